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
    /// Enters between the rounds.
    pub(super) key: u32,
}

impl Noise {
    /// Multipliers of the two rounds: `lowbias32` of Chris Wellons's hash-prospector.
    pub(super) const FACTORS: [u32; 2] = [0x7feb_352d, 0x846c_a68b];

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
        let x = self.counter;
        let x = (x ^ x >> 16).wrapping_mul(Self::FACTORS[0]) ^ self.key;
        let x = (x ^ x >> 15).wrapping_mul(Self::FACTORS[1]);
        x ^ x >> 16
    }
}

/// A step of SplitMix64.
fn mix(z: u64) -> u64 {
    let z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}
