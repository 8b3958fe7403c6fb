//! Tests of the whole command with a substituted engine.

use std::num::NonZeroU64;
use std::process::ExitCode;

use tenmil_base::Span;
use tenmil_block::{IoScheduler, QueueMap};
use tenmil_dma::CommandStore;

use crate::commands::{CommandEngines, dispatch};
use tenmil_base::Error;
use tenmil_bench::perf::perf_options::{
    AccessPattern, ArrivalProcess, BaselineKind, BlockLayerMode, BlockLayerOptions,
    CompletionDoorbell, FastPathSwitches, OpenLoop, PerfOptions, SizeMix,
};
use tenmil_bench::perf::report::sample_result::{failed_sample_result, sample_result};

fn engines_with_perf(perf: super::PerfEngine) -> CommandEngines {
    CommandEngines { perf, ..CommandEngines::production() }
}

/// Output and exit code of a command line.
fn run_and_capture(words: &[&str], engines: &CommandEngines) -> Result<(String, ExitCode), Error> {
    let words: Vec<_> = ["tenmil", "perf"].iter().chain(words).map(Into::into).collect();
    let mut out = Vec::new();
    let code = dispatch(&words, engines, &mut out)?;
    Ok((String::from_utf8(out).unwrap(), code))
}

/// The options passed to the engine, returned through its error.
fn parsed_options(words: &[&str]) -> String {
    let engines =
        engines_with_perf(|options, _, _| Err(Error::environment(format!("{options:?}"))));
    run_and_capture(words, &engines).unwrap_err().text
}

#[test]
fn every_flag_reaches_the_engine() {
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
        pattern: AccessPattern::RandRw,
        read_percent: 70,
        time: Span::from_secs(2),
        warm_up: Span::from_secs(0),
        queue_pairs: 2,
        io_count: Some(100),
        rate: Some(OpenLoop { per_second: 50_000, arrivals: ArrivalProcess::Uniform }),
        zipf: Some(0.9),
        layer: BlockLayerOptions {
            layer: Some(BlockLayerMode::Mq),
            map: Some(QueueMap { default: 2, read: 1, poll: 0 }),
            scheduler: IoScheduler::Merge,
            limit_iops: NonZeroU64::new(5_000),
            limit_bytes: NonZeroU64::new(10 << 20),
        },
        null_blk: Some(Span::from_secs(1)),
        overwrite: true,
        verify: true,
        techniques: FastPathSwitches {
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
    assert_eq!(parsed_options(&words), format!("{expected:?}"));
}

#[test]
fn baseline_argument_selects_its_kind_and_time() {
    for (value, baseline_kind) in [("tcp", BaselineKind::Tcp), ("tcp-uring", BaselineKind::TcpRing)]
    {
        let expected = PerfOptions {
            baseline_time: Some(Span::from_secs(1)),
            baseline_kind,
            ..PerfOptions::default()
        };
        assert_eq!(parsed_options(&[&format!("--baseline={value}")]), format!("{expected:?}"));
    }
}

#[test]
fn any_argument_disables_the_baseline_runs() {
    assert_eq!(parsed_options(&["-t", "10"]), format!("{:?}", PerfOptions::default()));
}

#[test]
fn json_replaces_the_text_or_is_written_to_a_file() {
    let engines = engines_with_perf(|_, _, _| Ok(sample_result()));
    let (text, code) = run_and_capture(&["--json"], &engines).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert!(json["iops"].as_f64().unwrap() > 3e7);
    assert_eq!(code, ExitCode::SUCCESS);

    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.json").display().to_string();
    let page = directory.path().join("a.html").display().to_string();
    let (text, _) =
        run_and_capture(&[&format!("--json={path}"), "--html", &page], &engines).unwrap();
    assert!(text.ends_with(&format!("report: {path}\nreport: {page}\n")), "{text}");
    let json: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    assert!(json["latency_ns"]["p9999"].is_u64());
    let page = std::fs::read_to_string(&page).unwrap();
    assert!(page.starts_with("<!DOCTYPE html>") && page.contains("--html"));
}

#[test]
fn failed_ios_give_the_remote_exit_code_and_a_report() {
    let (text, code) = run_and_capture(
        &[],
        &engines_with_perf(|options, _, _| {
            assert_eq!(*options, PerfOptions::default().with_default_baseline_and_report());
            Ok(failed_sample_result())
        }),
    )
    .unwrap();
    assert_eq!(code, ExitCode::from(3));
    assert!(text.contains("errors: 12"));
    std::fs::remove_file("tenmil-perf.html").unwrap();
}

#[test]
fn failed_engine_leaves_no_empty_report_file() {
    let directory = tempfile::tempdir().unwrap();
    let page = directory.path().join("a.html");
    let engines =
        engines_with_perf(|_, _, _| Err(Error::remote("emu:null #0: not ready after 500 ms")));
    let refused = run_and_capture(&["--html", &page.display().to_string()], &engines).unwrap_err();
    assert_eq!(refused.category.exit_code(), 3);
    assert!(!page.exists());
}

#[test]
fn jobs_of_fio_run_one_after_the_other() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("jobs.fio");
    let jobs = "[global]\nfilename=null\\:\nruntime=2\n[one]\niodepth=4\n[two]\nstonewall\nbs=8k\n";
    tenmil_linux::storage_file::create_text(&file, jobs).unwrap();
    let file = file.display().to_string();
    let engines = engines_with_perf(|_, _, _| Ok(sample_result()));
    let (text, code) = run_and_capture(&["--fio-job", &file], &engines).unwrap();
    assert_eq!(code, ExitCode::SUCCESS);
    let lines: Vec<&str> = text.lines().filter(|line| line.starts_with("job ")).collect();
    assert_eq!(
        lines,
        ["job one: tenmil perf -t 2 -q 4 null:", "job two: tenmil perf -t 2 -o 8k null:"]
    );
    let failing = engines_with_perf(|_, _, _| Ok(failed_sample_result()));
    let (text, code) = run_and_capture(&["--fio-job", &file], &failing).unwrap();
    assert_ne!(code, ExitCode::SUCCESS);
    assert!(!text.contains("job two"), "the first one has failed");
    let error = run_and_capture(&["--fio-job", &file, "-q", "8"], &engines).unwrap_err().text;
    assert!(error.contains("--fio-job"), "{error}");
    let error = run_and_capture(&["--fio-job", "/nonexistent"], &engines).unwrap_err().text;
    assert!(error.starts_with("perf --fio-job /nonexistent: "), "{error}");
}
