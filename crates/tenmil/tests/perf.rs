//! `perf` from end to end, as a program calls it: what is counted, when it ends, and that a thread
//! which sleeps is woken for every one of its SSDs.

#![expect(clippy::unwrap_used, reason = "a test may")]

use std::sync::Arc;

use base::Span;
use reactor::{PollMode, SPELL_MAX};
use tenmil::Uri;
use tenmil::perf::engine;
use tenmil::perf::options::{ArrivalLaw, OpenLoop, Pattern, PerfOptions, SizeMix};
use tenmil::perf::outcome::{Counts, Ended, PerfOutcome};
use tenmil::perf::progress::Progress;

fn run(options: &PerfOptions) -> PerfOutcome {
    let progress = Arc::new(Progress::new(options.thread_count() as usize));
    engine::run(options, &progress, &mut |_| {}).unwrap()
}

fn over(uris: &[&str]) -> PerfOptions {
    let uris: Vec<Uri> = uris.iter().map(|uri| uri.parse().unwrap()).collect();
    PerfOptions { uris, depth: 16, warm_up: Span::from_ms(50), ..PerfOptions::default() }
}

#[test]
fn a_number_of_ios_is_done_to_the_last_in_every_poll_mode() {
    for poll in PollMode::ALL {
        let options = PerfOptions {
            io_count: Some(1_001),
            poll,
            pattern: Pattern::RandRw,
            ..over(&["emu:null", "emu:ram?size=1m"])
        };
        let outcome = run(&options);
        assert_eq!(outcome.ended, Ended::Count);
        for device in &outcome.devices {
            assert_eq!(device.counts.ios, 1_001, "{} {poll}", device.name);
            assert_eq!(device.latency.count(), 1_001);
        }
        let Counts { ios, reads, writes, bytes, errors, .. } = outcome.totals;
        assert_eq!((ios, reads + writes, bytes, errors), (2_002, 2_002, 2_002 * 4096, 0));
        assert!(reads > 500 && writes > 500, "{reads} and {writes}");
        assert!(poll != PollMode::Always || outcome.sleeps == 0);
    }
}

#[test]
fn what_is_measured_lasts_as_long_as_was_asked_and_adds_up() {
    let options = PerfOptions { time: Span::from_ms(350), ..over(&["emu:null?count=2"]) };
    let outcome = run(&options);
    assert_eq!(outcome.ended, Ended::Time);
    assert!(outcome.elapsed >= options.time, "{}", outcome.elapsed);
    assert!(outcome.series.ios.len() >= 3, "a point for each tenth of a second");
    let (ios, sum) = (outcome.totals.ios, outcome.series.ios.iter().sum::<u64>());
    assert!(ios > 0 && sum > 0 && sum <= ios, "{sum} of {ios} are in the series");
    assert_eq!(ios, outcome.devices.iter().map(|device| device.counts.ios).sum::<u64>());
    assert_eq!(ios, outcome.latency.count());
    // Those that were in flight when the warm-up ended count as well.
    assert!(outcome.turns.completions >= ios);
}

/// Arrivals come 50 ms apart, and 8 MiB take the model of a P4600 longer than the longest spell: each
/// answer has to end a sleep, or is found by chance when another SSD's I/O begins.
#[test]
fn a_thread_that_sleeps_is_woken_for_each_of_its_ssds() {
    for poll in [PollMode::Adaptive, PollMode::Hybrid] {
        let rate = OpenLoop { per_second: 20, arrivals: ArrivalLaw::Uniform };
        let options = PerfOptions {
            rate: Some(rate),
            poll,
            depth: 2,
            sizes: SizeMix::of(8 << 20),
            time: Span::from_secs(1),
            ..over(&["emu:model:p4600?count=2&size=64m"])
        };
        let outcome = run(&options);
        assert!(outcome.sleeps >= 15, "{} sleeps in mode {poll}", outcome.sleeps);
        for device in &outcome.devices {
            let [least, median] = [1, 500_000].map(|part| device.latency.percentile(part));
            let median = Span { ns: median };
            assert!(least > SPELL_MAX.ns, "{least} ns are met awake");
            assert!(device.counts.ios >= 8, "{} I/Os of 10", device.counts.ios);
            assert!(median < Span::from_ms(20), "{} in mode {poll}: {median}", device.name);
        }
    }
}

#[test]
fn a_run_that_is_told_to_stop_does_so_with_what_it_has() {
    let options = PerfOptions { time: Span::from_secs(600), ..over(&["emu:null"]) };
    let progress = Arc::new(Progress::new(1));
    let outcome = engine::run(&options, &progress, &mut |progress| {
        if progress.sums().ios > 0 {
            progress.ask_to_stop();
        }
    });
    let outcome = outcome.unwrap();
    assert_eq!(outcome.ended, Ended::Interrupt);
    assert!(outcome.totals.ios > 0 && outcome.elapsed < Span::from_secs(60));
}
