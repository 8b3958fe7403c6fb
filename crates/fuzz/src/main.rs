//! `cargo run --release -p tenmil-fuzz`: every fuzz target for a few seconds, from a seed.
//!
//! A target is a plain function of bytes, which lives beside the code that it feeds. Here they are
//! run on stable, with a seeded mutator over a small corpus: not a search, but a net that is cast
//! in every CI run and repeats from its seed. `fuzz/` holds the same targets for a
//! coverage-guided search, for whoever has a toolchain for it.

#![forbid(unsafe_code)]

mod mutate;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use base::{Random, Span};
use clap::Parser;
use host::Clock;

/// A fuzz target: its name, and what it does with bytes.
type Target = (&'static str, fn(&[u8]));

const TARGETS: [Target; 3] = [
    ("wire", wire::fuzz::fuzz),
    ("front", ctrl::front::fuzz),
    ("controller", ctrl::controller::fuzz),
];

/// Feeds every parser what nobody would send on purpose.
#[derive(Debug, Parser)]
struct Options {
    /// Only this target: wire, front or controller.
    #[arg(long)]
    target: Option<String>,
    /// Seconds for each target.
    #[arg(long, default_value_t = 5)]
    seconds: u64,
    /// What everything is drawn from; the same seed tries the same inputs in the same order.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Where the corpus is: a folder of inputs for each target.
    #[arg(long, default_value = "fuzz/corpus")]
    corpus: PathBuf,
    /// Run this one input and nothing else.
    #[arg(long)]
    replay: Option<PathBuf>,
}

fn main() -> ExitCode {
    let options = Options::parse();
    let chosen = |(name, _): &&Target| options.target.as_deref().is_none_or(|only| only == *name);
    let targets: Vec<&Target> = TARGETS.iter().filter(chosen).collect();
    if targets.is_empty() {
        eprintln!("error: no target `{}`", options.target.unwrap_or_default());
        return ExitCode::from(2);
    }
    let clean = targets.into_iter().all(|target| match &options.replay {
        Some(file) => read(file).is_some_and(|bytes| survives(*target, &bytes)),
        None => cast(*target, &options),
    });
    if clean { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs one target for its time; says what happened.
fn cast(target: Target, options: &Options) -> bool {
    let (name, _) = target;
    let corpus = corpus_of(&options.corpus.join(name));
    let clock = Clock::start();
    let end = clock.now().after(Span::from_secs(options.seconds));
    let mut random = Random::new(options.seed);
    let mut count = 0_u64;
    if !corpus.iter().all(|bytes| survives(target, bytes)) {
        return false;
    }
    while count.is_multiple_of(64) || clock.now() < end {
        if clock.now() >= end {
            break;
        }
        let bytes = mutate::input(&mut random, &corpus);
        if !survives(target, &bytes) {
            return false;
        }
        count += 1;
    }
    println!(
        "fuzz {name}: {count} inputs from seed {} and {} in the corpus: nothing",
        options.seed,
        corpus.len()
    );
    true
}

/// Feeds `bytes` to a target. If it panics, keeps them and says how to see it again.
fn survives((name, feed): Target, bytes: &[u8]) -> bool {
    if catch_unwind(AssertUnwindSafe(|| feed(bytes))).is_ok() {
        return true;
    }
    let file = format!("fuzz-{name}.input");
    match host::file::save(Path::new(&file), bytes) {
        Ok(()) => eprintln!(
            "fuzz {name}: panicked; repeat with `cargo run -p tenmil-fuzz -- --target {name} \
             --replay {file}`"
        ),
        Err(error) => eprintln!("fuzz {name}: panicked on {bytes:?}; not saved: {error}"),
    }
    false
}

fn corpus_of(folder: &Path) -> Vec<Vec<u8>> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    files.sort();
    files.iter().filter_map(|file| read(file)).collect()
}

fn read(file: &Path) -> Option<Vec<u8>> {
    host::file::load(file)
        .inspect_err(|error| eprintln!("error: read {}: {error}", file.display()))
        .ok()
}
