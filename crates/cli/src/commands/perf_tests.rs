//! Tests of the whole command with a substituted engine.

use std::num::NonZeroU64;
use std::process::ExitCode;

use tenmil_base::Span;
use tenmil_block::{QueueMap, Scheduler};
use tenmil_dma::CommandStore;

use crate::commands::{Engines, dispatch};
use tenmil_base::Error;
use tenmil_bench::perf::options::{
    ArrivalProcess, BaselineKind, CompletionDoorbell, Layer, LayerOptions, OpenLoop, Pattern,
    PerfOptions, SizeMix, Techniques,
};
use tenmil_bench::perf::report::sample::{bad_sample, sample};

fn engines(perf: super::PerfEngine) -> Engines {
    Engines { perf, ..Engines::real() }
}

/// Output and exit code of a command line.
fn shown(words: &[&str], engines: &Engines) -> Result<(String, ExitCode), Error> {
    let words: Vec<_> = ["tenmil", "perf"].iter().chain(words).map(Into::into).collect();
    let mut out = Vec::new();
    let code = dispatch(&words, engines, &mut out)?;
    Ok((String::from_utf8(out).unwrap(), code))
}

/// The options passed to the engine, returned through its error.
fn asked(words: &[&str]) -> String {
    let engines = engines(|options, _, _| Err(Error::environment(format!("{options:?}"))));
    shown(words, &engines).unwrap_err().text
}

#[test]
fn every_letter_reaches_the_engine() {
    let words = "emu:ram?count=2 -q 8 --bssplit 4k:1,8k:3 -w randrw -M 70 -t 2 -a 0 -d 100 -P 2 \
                 --rate 50k --arrivals uniform --zipf 0.9 --overwrite --verify --seed 7 \
                 --no-doorbell-batching --cq-doorbell deferred --command-store plain \
                 --shadow-doorbells --no-huge-pages \
                 --baseline --ram --null-blk --block mq --queue-map default=2,read=1 \
                 --block-scheduler merge --limit-iops 5k --limit-bytes 10m";
    let words: Vec<&str> = words.split_whitespace().collect();
    let expected = PerfOptions {
        uris: vec!["emu:ram?count=2".parse().unwrap()],
        depth: 8,
        depth_may_be_less: false,
        sizes: SizeMix::parse("4k:1,8k:3").unwrap(),
        pattern: Pattern::RandRw,
        read_percent: 70,
        time: Span::from_secs(2),
        warm_up: Span::from_secs(0),
        queue_pairs: 2,
        io_count: Some(100),
        rate: Some(OpenLoop { per_second: 50_000, arrivals: ArrivalProcess::Uniform }),
        zipf: Some(0.9),
        layer: LayerOptions {
            layer: Some(Layer::Mq),
            map: Some(QueueMap { default: 2, read: 1, poll: 0 }),
            scheduler: Scheduler::Merge,
            limit_iops: NonZeroU64::new(5_000),
            limit_bytes: NonZeroU64::new(10 << 20),
        },
        null_blk: Some(Span::from_secs(1)),
        overwrite: true,
        verify: true,
        techniques: Techniques {
            doorbell_batching: false,
            completion_doorbell: CompletionDoorbell::Deferred,
            command_store: Some(CommandStore::Plain),
            shadow_doorbells: true,
            huge_pages: false,
        },
        baseline_time: Some(Span::from_secs(1)),
        ram: Some(Span::from_secs(2)),
        seed: 7,
        ..PerfOptions::default()
    };
    assert_eq!(asked(&words), format!("{expected:?}"));
}

#[test]
fn a_run_can_be_compared_with_bare_messages() {
    for (value, baseline_kind) in [("tcp", BaselineKind::Tcp), ("tcp-uring", BaselineKind::TcpRing)]
    {
        let expected = PerfOptions {
            baseline_time: Some(Span::from_secs(1)),
            baseline_kind,
            ..PerfOptions::default()
        };
        assert_eq!(asked(&[&format!("--baseline={value}")]), format!("{expected:?}"));
    }
}

#[test]
fn a_single_argument_takes_the_extras_away() {
    assert_eq!(asked(&["-t", "10"]), format!("{:?}", PerfOptions::default()));
}

#[test]
fn json_takes_the_place_of_the_text_or_goes_into_a_file_beside_it() {
    let engines = engines(|_, _, _| Ok(sample()));
    let (text, code) = shown(&["--json"], &engines).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert!(json["iops"].as_f64().unwrap() > 3e7);
    assert_eq!(code, ExitCode::SUCCESS);

    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.json").display().to_string();
    let page = directory.path().join("a.html").display().to_string();
    let (text, _) = shown(&[&format!("--json={path}"), "--html", &page], &engines).unwrap();
    assert!(text.ends_with(&format!("report: {path}\nreport: {page}\n")), "{text}");
    let json: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    assert!(json["latency_ns"]["p9999"].is_u64());
    let page = std::fs::read_to_string(&page).unwrap();
    assert!(page.starts_with("<!DOCTYPE html>") && page.contains("--html"));
}

#[test]
fn failed_ios_end_with_the_code_of_the_peer_and_with_a_report() {
    let (text, code) = shown(
        &[],
        &engines(|options, _, _| {
            assert_eq!(*options, PerfOptions::default().with_extras());
            Ok(bad_sample())
        }),
    )
    .unwrap();
    assert_eq!(code, ExitCode::from(3));
    assert!(text.contains("errors: 12"));
    std::fs::remove_file("tenmil-perf.html").unwrap();
}

#[test]
fn an_engine_that_refuses_leaves_no_empty_report_behind() {
    let directory = tempfile::tempdir().unwrap();
    let page = directory.path().join("a.html");
    let engines = engines(|_, _, _| Err(Error::remote("emu:null #0: not ready after 500 ms")));
    let refused = shown(&["--html", &page.display().to_string()], &engines).unwrap_err();
    assert_eq!(refused.category.exit_code(), 3);
    assert!(!page.exists());
}
