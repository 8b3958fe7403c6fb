//! `cargo run -p tenmil-fuzz`: runs every fuzz target for a few seconds, from a seed.
//!
//! A target is a function of bytes that is defined beside the code it tests. Here targets run on
//! stable Rust, with a seeded mutator over a small corpus: a reproducible smoke test for every CI
//! run. `fuzz/` contains the same targets for a coverage-guided search, which needs a nightly
//! toolchain.
//!
//! Exit codes: 0 if nothing was found, 1 if something was found, 2 for invalid arguments.

#![forbid(unsafe_code)]
#![expect(clippy::disallowed_methods, reason = "a program on the top floor: inputs are files")]

mod corpus_seeds;
mod mutate;
mod target_runner;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use target_runner::FuzzTarget;
use tenmil_base::{Random, Span};
use tenmil_linux::Clock;

/// All fuzz targets.
const TARGETS: [FuzzTarget; 18] = [
    FuzzTarget { name: "wire", feed: tenmil_wire::fuzz::fuzz_all_parsers },
    FuzzTarget {
        name: "controller",
        feed: tenmil_nvme_controller::controller::fuzz_admin_commands,
    },
    FuzzTarget { name: "front", feed: tenmil_nvme_controller::fuzz::fuzz_memory_transport },
    FuzzTarget { name: "control", feed: tenmil_rpc::fuzz::fuzz_api_request },
    FuzzTarget { name: "block", feed: tenmil_block::fuzz::fuzz_uri },
    FuzzTarget { name: "signatures", feed: tenmil_block::fuzz::fuzz_device_edges },
    FuzzTarget { name: "nbd", feed: tenmil_serve::nbd::fuzz::fuzz_nbd_connection },
    FuzzTarget { name: "tcp_host", feed: tenmil_nvme_tcp::fuzz::fuzz_host },
    FuzzTarget { name: "tcp_controller", feed: tenmil_nvme_tcp::fuzz::fuzz_controller },
    FuzzTarget { name: "tcp_service", feed: tenmil_serve::tcp::fuzz::fuzz_nvme_tcp_target },
    FuzzTarget {
        name: "tcp_authentication",
        feed: tenmil_serve::tcp::fuzz::fuzz_nvme_tcp_authentication,
    },
    FuzzTarget { name: "tls", feed: tenmil_tls::fuzz::fuzz_tls },
    FuzzTarget { name: "volume", feed: tenmil_volume::fuzz::fuzz_decoders },
    FuzzTarget { name: "volume_stream", feed: tenmil_volume::fuzz::fuzz_stream },
    FuzzTarget { name: "vfu_server", feed: tenmil_vfio_user::fuzz::fuzz_server },
    FuzzTarget { name: "vfu_client", feed: tenmil_vfio_user::fuzz::fuzz_client },
    FuzzTarget { name: "vhost_server", feed: tenmil_vhost_user::fuzz::fuzz_server },
    FuzzTarget { name: "vhost_ring", feed: tenmil_vhost_user::fuzz::fuzz_ring },
];

/// Run the fuzz targets on mutated inputs
#[derive(Debug, Parser)]
struct FuzzOptions {
    /// Run only this target: wire, controller, front, control, block, signatures, nbd, tcp_host,
    /// tcp_controller, tcp_service, tcp_authentication, tls, volume, volume_stream, vfu_server,
    /// vfu_client, vhost_server or vhost_ring
    #[arg(long, value_name = "NAME", conflicts_with = "injected_bugs")]
    target: Option<String>,

    /// Seconds for each target
    #[arg(long, value_name = "N", default_value_t = 5)]
    seconds: u64,

    /// Stop a target after this many inputs, regardless of the time
    #[arg(long, value_name = "N")]
    count: Option<u64>,

    /// Seed; the same seed runs the same inputs in the same order
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    seed: u64,

    /// Directory of the corpus, with one folder of inputs per target
    #[arg(long, value_name = "FOLDER", default_value = "fuzz/corpus")]
    corpus: PathBuf,

    /// Directory for inputs that were found
    #[arg(long, value_name = "FOLDER", default_value = ".")]
    keep: PathBuf,

    /// Run this one input only
    #[arg(long, value_name = "FILE")]
    replay: Option<PathBuf>,

    /// Regenerate the corpus from its source code, and run nothing
    #[arg(long, conflicts_with_all = ["replay", "injected_bugs"])]
    make_corpus: bool,

    /// Run a target with an injected bug, which must be found
    #[arg(long)]
    injected_bugs: bool,
}

fn main() -> ExitCode {
    match run_fuzzer(&FuzzOptions::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(text) => {
            eprintln!("error: {text}");
            ExitCode::from(2)
        }
    }
}

/// Runs what was requested. A finding ends the process where it occurs: see [`target_runner`].
fn run_fuzzer(options: &FuzzOptions) -> Result<(), String> {
    if options.make_corpus {
        return make_corpus(&options.corpus);
    }
    target_runner::install_crash_saving_hook(&options.keep);
    for target in selected_targets(options)? {
        match &options.replay {
            Some(file) => {
                target.run_input(&read_file(file)?);
                println!("fuzz {}: {}: nothing", target.name, file.display());
            }
            None => run_target(target, options)?,
        }
    }
    Ok(())
}

fn selected_targets(options: &FuzzOptions) -> Result<Vec<FuzzTarget>, String> {
    if options.injected_bugs {
        return Ok(vec![target_runner::INJECTED_BUG]);
    }
    let Some(only) = &options.target else { return Ok(TARGETS.to_vec()) };
    let target = TARGETS.into_iter().find(|target| target.name == only);
    let target = target.ok_or_else(|| {
        format!(
            "--target {only}: there is none, expected wire, controller, front, control, block, \
             signatures, nbd, tcp_host, tcp_controller, tcp_service, tcp_authentication, tls, \
             volume, volume_stream, vfu_server, vfu_client, vhost_server or vhost_ring"
        )
    })?;
    Ok(vec![target])
}

/// Runs one target for its time: first the corpus, then mutated inputs.
fn run_target(target: FuzzTarget, options: &FuzzOptions) -> Result<(), String> {
    let corpus = corpus_of(target, &options.corpus)?;
    let clock = Clock::start();
    let end = clock.now().after(Span::from_secs(options.seconds));
    let mut random = Random::new(options.seed);
    corpus.iter().for_each(|bytes| target.run_input(bytes));
    let mut count = 0_u64;
    while options.count.is_none_or(|most| count < most) && clock.now() < end {
        target.run_input(&mutate::generate_input(&mut random, &corpus));
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

/// Inputs of the target's folder, by name. The target with the injected bug has none.
fn corpus_of(target: FuzzTarget, corpus: &Path) -> Result<Vec<Vec<u8>>, String> {
    if target == target_runner::INJECTED_BUG {
        return Ok(Vec::new());
    }
    let folder = corpus.join(target.name);
    let entries = std::fs::read_dir(&folder)
        .map_err(|error| format!("--corpus: read {}: {error}", folder.display()))?;
    let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    files.sort();
    files.iter().map(|file| read_file(file)).collect()
}

fn make_corpus(corpus: &Path) -> Result<(), String> {
    for seed in corpus_seeds::all_seeds() {
        let folder = corpus.join(seed.target);
        let file = folder.join(seed.name);
        std::fs::create_dir_all(&folder)
            .and_then(|()| std::fs::write(&file, &seed.bytes))
            .map_err(|error| format!("write {}: {error}", file.display()))?;
    }
    Ok(())
}

fn read_file(file: &Path) -> Result<Vec<u8>, String> {
    std::fs::read(file).map_err(|error| format!("read {}: {error}", file.display()))
}
