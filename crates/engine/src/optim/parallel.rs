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
pub fn update_all(pool: &rayon::ThreadPool, level: Level, work: Vec<(Chunk<'_>, &Consts)>) {
    each_piece(pool, work, |chunk, consts| update(level, chunk, consts));
}

/// As [`update_all`], with another kernel.
pub fn each_piece<'a, T: Copy + Send>(
    pool: &rayon::ThreadPool,
    mut work: Vec<(Chunk<'a>, T)>,
    each: impl Fn(&mut Chunk<'a>, T) + Sync,
) {
    if work.iter().any(|(chunk, _)| chunk.len() > PIECE) {
        work = work.into_iter().flat_map(|(chunk, with)| cut(chunk).map(move |chunk| (chunk, with))).collect();
    }
    let run = |piece: &mut [(Chunk<'a>, T)]| piece.iter_mut().for_each(|(chunk, with)| each(chunk, *with));
    let mut pieces = group(&mut work);
    match pieces.as_mut_slice() {
        [piece] => run(piece),
        _ => pool.install(|| pieces.into_par_iter().with_max_len(1).for_each(run)),
    }
}

/// Runs of at most [`PIECE`] elements.
fn cut(chunk: Chunk<'_>) -> impl Iterator<Item = Chunk<'_>> {
    let mut rest = Some(chunk);
    std::iter::from_fn(move || {
        let chunk = rest.take()?;
        if chunk.len() <= PIECE {
            return Some(chunk);
        }
        let (head, tail) = chunk.split_at(PIECE);
        rest = Some(tail);
        Some(head)
    })
}

/// Neighbours that together have about [`PIECE`] elements.
fn group<'w, 'a, T>(mut work: &'w mut [(Chunk<'a>, T)]) -> Vec<&'w mut [(Chunk<'a>, T)]> {
    let mut pieces = Vec::new();
    while !work.is_empty() {
        let mut elements = 0;
        let full = work.iter().position(|(chunk, _)| {
            elements += chunk.len();
            elements >= PIECE
        });
        let (piece, rest) = work.split_at_mut(full.map_or(work.len(), |last| last + 1));
        pieces.push(piece);
        work = rest;
    }
    pieces
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
///
/// # Panics
///
/// If the lengths differ.
pub fn accumulate_all(pool: &rayon::ThreadPool, level: Level, sum: &mut [f32], addend: Source<'_>) -> f64 {
    assert_eq!(addend.len(), sum.len(), "sum and addend differ in length");
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
