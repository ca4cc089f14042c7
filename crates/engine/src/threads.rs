//! Our own rayon pool. Its size follows the affinity mask, the cgroup CPU quota and the number of local
//! ranks, never `OMP_NUM_THREADS` (torchrun sets that to 1).

#![forbid(unsafe_code)]

use crate::error::{Error, Result};

/// Overrides the number of update threads.
pub const THREADS_VARIABLE: &str = "TRAINSTREAM_NUM_THREADS";

/// Threads to use: `asked`, else `TRAINSTREAM_NUM_THREADS`, else this rank's share of the CPUs that the
/// affinity mask and the cgroup quota leave (`std::thread::available_parallelism` reads both).
pub fn count(asked: Option<usize>) -> Result<usize> {
    let available = std::thread::available_parallelism().map_or(1, usize::from);
    choose(asked, |name| std::env::var(name).ok(), available)
}

fn choose(asked: Option<usize>, variable: impl Fn(&str) -> Option<String>, available: usize) -> Result<usize> {
    let positive = |option: &'static str, text: String| match text.trim().parse::<usize>() {
        Ok(n) if n > 0 => Ok(n),
        _ => Err(Error::Config { option, value: text, allowed: "expected a whole number of at least 1".into() }),
    };
    if let Some(n) = asked {
        return positive("threads", n.to_string());
    }
    if let Some(text) = variable(THREADS_VARIABLE) {
        return positive(THREADS_VARIABLE, text);
    }
    let ranks = match variable("LOCAL_WORLD_SIZE") {
        Some(text) => positive("LOCAL_WORLD_SIZE", text)?,
        None => 1,
    };
    Ok((available / ranks).max(1))
}

/// A pool of `threads` persistent workers named `trainstream-N`.
pub fn pool(threads: usize) -> Result<rayon::ThreadPool> {
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(|i| format!("trainstream-{i}"))
        .build()
        .map_err(|e| Error::Threads { what: "the update threads", why: e.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(vars: &[(&str, &str)], asked: Option<usize>, available: usize) -> Result<usize> {
        choose(asked, |n| vars.iter().find(|(k, _)| *k == n).map(|(_, v)| v.to_string()), available)
    }

    #[test]
    fn ranks_share_the_cpus_and_openmp_is_ignored() {
        assert_eq!(with(&[("OMP_NUM_THREADS", "1")], None, 16).unwrap(), 16);
        assert_eq!(with(&[("LOCAL_WORLD_SIZE", "4")], None, 16).unwrap(), 4);
        assert_eq!(with(&[("LOCAL_WORLD_SIZE", "8")], None, 2).unwrap(), 1);
        assert_eq!(with(&[(THREADS_VARIABLE, "3"), ("LOCAL_WORLD_SIZE", "4")], None, 16).unwrap(), 3);
        assert_eq!(with(&[(THREADS_VARIABLE, "3")], Some(5), 16).unwrap(), 5);
    }

    #[test]
    fn nonsense_is_named() {
        for (vars, asked) in
            [(vec![(THREADS_VARIABLE, "zero")], None), (vec![("LOCAL_WORLD_SIZE", "0")], None), (vec![], Some(0))]
        {
            let text = with(&vars, asked, 2).unwrap_err().to_string();
            assert!(text.contains("expected a whole number"), "{text}");
        }
    }
}
