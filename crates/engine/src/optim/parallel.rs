//! The kernels on all threads of a pool. Results do not depend on the number of threads.

#![forbid(unsafe_code)]

use rayon::prelude::*;

use super::{Chunk, Consts, Level, Source, accumulate, squares, update};

/// Elements one thread works on before it takes the next piece: large enough to amortise the queue, small enough to
/// balance the threads.
pub const PIECE: usize = 128 << 10;

/// Updates all chunks in one parallel region. Large ones are cut, small ones share a piece.
///
/// # Panics
///
/// As [`update`].
pub fn update_all(pool: &rayon::ThreadPool, level: Level, work: Vec<(Chunk<'_>, Consts)>) {
    each_piece(pool, work, |chunk, consts| update(level, chunk, &consts));
}

/// As [`update_all`], with another kernel.
pub fn each_piece<'a, T: Copy + Send>(
    pool: &rayon::ThreadPool,
    work: Vec<(Chunk<'a>, T)>,
    each: impl Fn(Chunk<'a>, T) + Sync,
) {
    let mut pieces = Vec::new();
    let (mut open, mut elements) = (Vec::new(), 0);
    for (mut chunk, with) in work {
        while chunk.len() > PIECE {
            let (head, tail) = chunk.split_at(PIECE);
            pieces.push(vec![(head, with)]);
            chunk = tail;
        }
        elements += chunk.len();
        open.push((chunk, with));
        if elements >= PIECE {
            pieces.push(std::mem::take(&mut open));
            elements = 0;
        }
    }
    pieces.push(open);
    let run = |piece: Vec<_>| piece.into_iter().for_each(|(chunk, with)| each(chunk, with));
    match pieces.len() {
        1 => pieces.into_iter().for_each(run),
        _ => pool.install(|| pieces.into_par_iter().with_max_len(1).for_each(run)),
    }
}

/// [`squares`] on all threads: pieces of [`PIECE`] elements, added up in their order.
pub fn squares_all(pool: &rayon::ThreadPool, level: Level, from: Source<'_>) -> f64 {
    if from.len() <= PIECE {
        return squares(level, from);
    }
    let sums: Vec<f64> = pool.install(|| pieces(from).into_par_iter().map(|piece| squares(level, piece)).collect());
    sums.iter().sum()
}

/// [`accumulate`] on all threads. Returns what [`squares_all`] would of the new `sum`.
pub fn accumulate_all(pool: &rayon::ThreadPool, level: Level, sum: &mut [f32], addend: Source<'_>) -> f64 {
    if sum.len() <= PIECE {
        return accumulate(level, sum, addend);
    }
    let work: Vec<_> = sum.chunks_mut(PIECE).zip(pieces(addend)).collect();
    let sums: Vec<f64> =
        pool.install(|| work.into_par_iter().map(|(sum, addend)| accumulate(level, sum, addend)).collect());
    sums.iter().sum()
}

fn pieces(mut from: Source<'_>) -> Vec<Source<'_>> {
    let mut pieces = Vec::with_capacity(from.len().div_ceil(PIECE));
    while from.len() > PIECE {
        let (head, tail) = from.split_at(PIECE);
        pieces.push(head);
        from = tail;
    }
    pieces.push(from);
    pieces
}
