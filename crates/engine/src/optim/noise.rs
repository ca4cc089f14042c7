//! Random bits for stochastic rounding, from a counter: the same for every split into chunks, thread count and
//! instruction set.

#![forbid(unsafe_code)]

/// Mixed into every key.
const SEED: u64 = 0x7472_6169_6e73_7472;

/// The random words of consecutive elements of one parameter in one step. They repeat after 2^32 elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Noise {
    /// Counter of the next element.
    pub(super) counter: u32,
    /// Tells parameters and steps apart.
    pub(super) key: u32,
}

impl Noise {
    /// Distance of two counters in the sequence that is hashed: 2^32 over the golden ratio.
    pub(super) const STRIDE: u32 = 0x9e37_79b1;
    /// Multiplier of the hash. One round is enough: means, lags, pairs of neighbours and block sums look as random as
    /// with the two of `lowbias32`, at half the cost.
    pub(super) const FACTOR: u32 = 0x846c_a68b;

    /// The words of `parameter`, a number of the caller's choice, in update number `step`; from its element 0.
    pub fn new(parameter: u64, step: u64) -> Self {
        let z = mix(mix(SEED ^ parameter) ^ step);
        Self { counter: z as u32, key: (z >> 32) as u32 }
    }

    /// From `n` elements further on.
    pub fn skip(self, n: usize) -> Self {
        Self { counter: self.counter.wrapping_add(n as u32), ..self }
    }

    /// The word of the next element.
    pub fn word(self) -> u32 {
        let x = self.counter.wrapping_mul(Self::STRIDE);
        let x = (x ^ x >> 16 ^ self.key).wrapping_mul(Self::FACTOR);
        x ^ x >> 15
    }
}

/// A step of SplitMix64.
fn mix(z: u64) -> u64 {
    let z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}
