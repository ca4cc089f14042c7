//! The engine of trainstream: host memory, devices, the host optimizer and the flow between them.
//!
//! Rooms, from the bottom up; arrows run downwards only (`tests/arrows.rs` checks the `use` lines):
//!
//! * [`error`], [`dtype`], [`threads`], [`stats`], [`trace`]: basics everyone may use;
//! * [`host`]: memory maps, parallel first touch, pinned arenas that hand out exact ranges;
//! * [`device`]: the [`device::Device`] trait with a CUDA and a host implementation;
//! * [`optim`]: AdamW as arithmetic over slices, with no device in sight;
//! * [`store`]: where one parameter's master weights, moments and gradient live;
//! * [`flow`]: the worker that accumulates, updates and uploads in order;
//! * [`engine`]: the façade that the bindings call.
//!
//! `unsafe` lives in [`host`], [`device`] and `optim/kernels`; every other module forbids it.

pub mod device;
pub mod dtype;
pub mod engine;
pub mod error;
pub mod flow;
pub mod host;
pub mod optim;
pub mod stats;
pub mod store;
pub mod threads;
pub mod trace;

pub use engine::{Engine, Options};
pub use error::{Error, Result};

/// The optional features of this build.
pub const FEATURES: &[&str] = if cfg!(feature = "cuda") { &["cuda"] } else { &[] };
