//! The rooms of the engine and the arrows between them, read off the `use` lines.

use std::fs;
use std::path::{Path, PathBuf};

/// A room and the rooms it may use, beside the basics that all may use.
const ROOMS: &[(&str, &[&str])] = &[
    ("host", &[]),
    ("optim", &[]),
    ("device", &["host"]),
    ("store", &["device", "host", "optim"]),
    ("flow", &["store", "device", "host", "optim"]),
    ("engine", &["flow", "store", "device", "host", "optim"]),
];
const BASICS: &[&str] = &["error", "dtype", "stats", "threads", "trace"];
/// Where `unsafe` may be written.
const FENCED: &[&str] = &["host/", "device/", "optim/kernels/", "optim/tests"];

fn sources(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => sources(&path, found),
            false => found.push(path),
        }
    }
}

/// `(path below src, text)` of every source file.
fn tree() -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut found = Vec::new();
    sources(&root, &mut found);
    let below = |p: &PathBuf| p.strip_prefix(&root).unwrap().to_str().unwrap().replace('\\', "/");
    found.iter().map(|p| (below(p), fs::read_to_string(p).unwrap())).collect()
}

fn room(path: &str) -> &str {
    path.split('/').next().unwrap().trim_end_matches(".rs")
}

#[test]
fn arrows_run_downwards() {
    let mut arrows = 0;
    for (path, text) in tree() {
        let from = room(&path);
        for (number, line) in text.lines().enumerate() {
            let Some(rest) = line.trim_start().trim_start_matches("pub ").strip_prefix("use crate::") else { continue };
            let names: Vec<String> = match rest.strip_prefix('{') {
                Some(list) => list.split(',').map(|n| n.trim().trim_end_matches(['}', ';']).into()).collect(),
                None => vec![rest.to_string()],
            };
            for name in names {
                let to = name.split([':', ';', ',']).next().unwrap();
                arrows += 1;
                if to == from || BASICS.contains(&to) {
                    continue;
                }
                let allowed = ROOMS.iter().find(|(r, _)| *r == from).map_or(&[][..], |(_, a)| a);
                assert!(allowed.contains(&to), "{path}:{}: {from} may not use {to}", number + 1);
            }
        }
    }
    assert!(arrows > 20, "only {arrows} use lines were understood");
}

#[test]
fn unsafe_stays_in_its_places() {
    let word = |line: &str| {
        let code = line.split("//").next().unwrap();
        code.split(|c: char| !c.is_alphanumeric() && c != '_').any(|w| w == "unsafe")
    };
    let mut fenced = 0;
    for (path, text) in tree() {
        let uses = text.lines().filter(|line| word(line)).count();
        if FENCED.iter().any(|place| path.starts_with(place)) {
            fenced += uses;
        } else {
            assert_eq!(uses, 0, "{path} contains unsafe");
        }
    }
    assert!(fenced > 20);
}

#[test]
fn files_stay_short() {
    for (path, text) in tree() {
        assert!(text.lines().count() <= 500, "{path} has more than 500 lines");
    }
}
