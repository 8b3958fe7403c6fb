//! `cargo run -p tenmil-fuzz`: every fuzz target for a few seconds, from a seed.
//!
//! A target is a plain function of bytes, which lives beside the code that it feeds. Here they are
//! run on stable, with a seeded mutator over a small corpus: not a search, but a net that is cast
//! in every CI run and repeats from its seed. `fuzz/` holds the same targets for a
//! coverage-guided search, for whoever has a toolchain for it.
//!
//! Exit codes: 0 if nothing was found, 1 if something was, 2 if what was asked for makes no sense.

#![forbid(unsafe_code)]
#![expect(clippy::disallowed_methods, reason = "a program on the top floor: inputs are files")]

mod feed;
mod mutate;
mod seeds;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use base::{Random, Span};
use clap::Parser;
use feed::Target;
use host::Clock;

/// Every fuzz target there is.
const TARGETS: [Target; 16] = [
    Target { name: "wire", feed: wire::fuzz::fuzz },
    Target { name: "controller", feed: ctrl::controller::fuzz },
    Target { name: "front", feed: ctrl::fuzz::front_end },
    Target { name: "control", feed: control::fuzz::fuzz },
    Target { name: "block", feed: block::fuzz::fuzz },
    Target { name: "signatures", feed: block::fuzz::fuzz_ends },
    Target { name: "nbd", feed: target::nbd::fuzz::fuzz },
    Target { name: "tcp_host", feed: tcp::fuzz::host },
    Target { name: "tcp_controller", feed: tcp::fuzz::controller },
    Target { name: "tcp_service", feed: target::tcp::fuzz::fuzz },
    Target { name: "volume", feed: volume::fuzz::fuzz },
    Target { name: "volume_stream", feed: volume::fuzz::stream },
    Target { name: "vfu_server", feed: vfu::fuzz::server },
    Target { name: "vfu_client", feed: vfu::fuzz::client },
    Target { name: "vhost_server", feed: vhost::fuzz::server },
    Target { name: "vhost_ring", feed: vhost::fuzz::ring },
];

/// Feeds every parser what nobody would send on purpose.
#[derive(Debug, Parser)]
struct Options {
    /// Only this target: wire, controller, front, control, block, signatures, nbd, tcp_host,
    /// tcp_controller, tcp_service, volume, volume_stream, vfu_server, vfu_client, vhost_server or
    /// vhost_ring
    #[arg(long, value_name = "NAME", conflicts_with = "canary")]
    target: Option<String>,

    /// Seconds for each target
    #[arg(long, value_name = "N", default_value_t = 5)]
    seconds: u64,

    /// Stop a target after so many inputs, whatever the time
    #[arg(long, value_name = "N")]
    count: Option<u64>,

    /// What everything is drawn from; the same seed tries the same inputs in the same order
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    seed: u64,

    /// Where the corpus is: a folder of inputs for each target
    #[arg(long, value_name = "FOLDER", default_value = "fuzz/corpus")]
    corpus: PathBuf,

    /// Where an input that was found is kept
    #[arg(long, value_name = "FOLDER", default_value = ".")]
    keep: PathBuf,

    /// Run this one input and nothing else
    #[arg(long, value_name = "FILE")]
    replay: Option<PathBuf>,

    /// Write the corpus again from the code that describes it, and run nothing
    #[arg(long, conflicts_with_all = ["replay", "canary"])]
    make_corpus: bool,

    /// Feed a target with a planted bug, which must be found
    #[arg(long)]
    canary: bool,
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(text) => {
            eprintln!("error: {text}");
            ExitCode::from(2)
        }
    }
}

/// Does what was asked for. What is found ends the process where it is found: see [`feed`].
fn run(options: &Options) -> Result<(), String> {
    if options.make_corpus {
        return make_corpus(&options.corpus);
    }
    feed::keep_findings(&options.keep);
    for target in chosen(options)? {
        match &options.replay {
            Some(file) => {
                target.try_out(&read(file)?);
                println!("fuzz {}: {}: nothing", target.name, file.display());
            }
            None => cast(target, options)?,
        }
    }
    Ok(())
}

fn chosen(options: &Options) -> Result<Vec<Target>, String> {
    if options.canary {
        return Ok(vec![feed::CANARY]);
    }
    let Some(only) = &options.target else { return Ok(TARGETS.to_vec()) };
    let target = TARGETS.into_iter().find(|target| target.name == only);
    let target = target.ok_or_else(|| {
        format!(
            "--target {only}: there is none, expected wire, controller, front, control, block, \
             signatures, nbd, tcp_host, tcp_controller, tcp_service, volume, volume_stream, \
             vfu_server, vfu_client, vhost_server or vhost_ring"
        )
    })?;
    Ok(vec![target])
}

/// Runs one target for its time: first the corpus, then what is made from it.
fn cast(target: Target, options: &Options) -> Result<(), String> {
    let corpus = corpus_of(target, &options.corpus)?;
    let clock = Clock::start();
    let end = clock.now().after(Span::from_secs(options.seconds));
    let mut random = Random::new(options.seed);
    corpus.iter().for_each(|bytes| target.try_out(bytes));
    let mut count = 0_u64;
    while options.count.is_none_or(|most| count < most) && clock.now() < end {
        target.try_out(&mutate::input(&mut random, &corpus));
        count += 1;
    }
    println!(
        "fuzz {}: {count} inputs from seed {} and {} in the corpus: nothing",
        target.name,
        options.seed,
        corpus.len()
    );
    Ok(())
}

/// The inputs in the target's folder, by name. The canary has none: it is found from nothing.
fn corpus_of(target: Target, corpus: &Path) -> Result<Vec<Vec<u8>>, String> {
    if target == feed::CANARY {
        return Ok(Vec::new());
    }
    let folder = corpus.join(target.name);
    let entries = std::fs::read_dir(&folder)
        .map_err(|error| format!("--corpus: read {}: {error}", folder.display()))?;
    let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    files.sort();
    files.iter().map(|file| read(file)).collect()
}

fn make_corpus(corpus: &Path) -> Result<(), String> {
    for seed in seeds::all() {
        let folder = corpus.join(seed.target);
        let file = folder.join(seed.name);
        std::fs::create_dir_all(&folder)
            .and_then(|()| std::fs::write(&file, &seed.bytes))
            .map_err(|error| format!("write {}: {error}", file.display()))?;
    }
    Ok(())
}

fn read(file: &Path) -> Result<Vec<u8>, String> {
    std::fs::read(file).map_err(|error| format!("read {}: {error}", file.display()))
}
