//! The element types that cross the seam.

#![forbid(unsafe_code)]

use crate::error::{Error, Result};

/// Element type of a weight, a gradient or a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE single precision.
    F32,
    /// bfloat16: the upper half of an `F32`.
    Bf16,
    /// IEEE half precision.
    F16,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::Bf16 | DType::F16 => 2,
        }
    }

    /// torch's name without the `torch.` prefix.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "float32",
            DType::Bf16 => "bfloat16",
            DType::F16 => "float16",
        }
    }

    /// The type with this torch name; `option` names the argument in the error.
    pub fn parse(option: &'static str, name: &str) -> Result<Self> {
        match name {
            "float32" => Ok(DType::F32),
            "bfloat16" => Ok(DType::Bf16),
            "float16" => Ok(DType::F16),
            _ => Err(Error::Config {
                option,
                value: name.into(),
                allowed: "expected float32, bfloat16 or float16".into(),
            }),
        }
    }
}
