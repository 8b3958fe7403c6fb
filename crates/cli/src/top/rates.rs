//! Rates per second between two samples.

use std::collections::BTreeMap;

use super::process_sample::{PollerSample, ProcessSample, ReactorSample, ThreadSample};

/// Rates between two samples. Lists are in the order of the later sample.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct SampleRates {
    /// Time between the samples.
    pub(crate) span_ns: u64,
    pub(crate) whole: TotalRates,
    pub(crate) reactors: Vec<ReactorRates>,
    pub(crate) threads: Vec<ThreadRates>,
    pub(crate) pollers: Vec<PollerRates>,
}

/// Rates of all reactors together.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct TotalRates {
    /// Busy share of all reactors: 100 means that all were busy all of the time.
    pub(crate) busy_percent: f64,
    pub(crate) sleeps: f64,
    pub(crate) messages: f64,
    pub(crate) migrations: f64,
}

/// Rates of a reactor.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct ReactorRates {
    pub(crate) busy_percent: f64,
    pub(crate) iterations: f64,
    pub(crate) sleeps: f64,
    pub(crate) messages: f64,
    pub(crate) migrations: f64,
    /// Awake in both samples, with no iteration finished in between.
    pub(crate) is_stuck: bool,
}

/// Rates of a thread.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct ThreadRates {
    pub(crate) busy_percent: f64,
    pub(crate) messages: f64,
}

/// Rates of a poller.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct PollerRates {
    pub(crate) polls: f64,
    /// Share of polls that found work; `None` if there were no polls.
    pub(crate) found_percent: Option<f64>,
}

/// Computes the rates between `before` and `after`.
///
/// An object missing in `before` counts as started in between, with all counters at zero. The same
/// holds if a counter decreased: the object is a new one with a reused number, as after a program has
/// replaced its reactors.
pub(crate) fn rates_between(before: &ProcessSample, after: &ProcessSample) -> SampleRates {
    let span_ns = after.monotonic_ns.saturating_sub(before.monotonic_ns);
    let reactors: Vec<_> = after
        .reactors
        .iter()
        .map(|now| {
            reactor_rates(before.reactors.iter().find(|then| then.id == now.id), now, span_ns)
        })
        .collect();
    let earlier: BTreeMap<u32, &ThreadSample> =
        before.threads.iter().map(|it| (it.id, it)).collect();
    let thread = |now: &ThreadSample| thread_rates(earlier.get(&now.id).copied(), now, span_ns);
    let sum = |part: fn(&ReactorRates) -> f64| {
        reactors.iter().map(part).fold(0.0, |sum, part| sum + part)
    };
    let whole = TotalRates {
        busy_percent: sum(|it| it.busy_percent) / to_f64(reactors.len().max(1) as u64),
        sleeps: sum(|it| it.sleeps),
        messages: sum(|it| it.messages),
        migrations: sum(|it| it.migrations),
    };
    let threads = after.threads.iter().map(thread).collect();
    SampleRates { span_ns, whole, reactors, threads, pollers: poller_rates(before, after, span_ns) }
}

fn reactor_rates(then: Option<&ReactorSample>, now: &ReactorSample, span_ns: u64) -> ReactorRates {
    let same = then.filter(|then| then.iterations <= now.iterations && then.busy_ns <= now.busy_ns);
    let nought = ReactorSample::default();
    let then = same.unwrap_or(&nought);
    let rate = |part: fn(&ReactorSample) -> u64| per_second(part(then), part(now), span_ns);
    ReactorRates {
        busy_percent: capped_percent(now.busy_ns - then.busy_ns, span_ns),
        iterations: rate(|it| it.iterations),
        sleeps: rate(|it| it.sleeps),
        messages: rate(|it| it.messages),
        migrations: rate(|it| it.migrations),
        is_stuck: same.is_some_and(|then| {
            then.iterations == now.iterations && !then.sleeping && !now.sleeping
        }),
    }
}

fn thread_rates(then: Option<&ThreadSample>, now: &ThreadSample, span_ns: u64) -> ThreadRates {
    let same = then.filter(|then| then.name == now.name && then.busy_ns <= now.busy_ns);
    let nought = ThreadSample::default();
    let then = same.unwrap_or(&nought);
    ThreadRates {
        busy_percent: capped_percent(now.busy_ns - then.busy_ns, span_ns),
        messages: per_second(then.messages, now.messages, span_ns),
    }
}

/// Pollers are matched by thread, name, and position among those of the same name.
fn poller_rates(before: &ProcessSample, after: &ProcessSample, span_ns: u64) -> Vec<PollerRates> {
    let mut earlier: BTreeMap<(u32, &str), Vec<&PollerSample>> = BTreeMap::new();
    for poller in before.pollers.iter().rev() {
        earlier.entry((poller.thread_id, &poller.name)).or_default().push(poller);
    }
    let mut rates = Vec::with_capacity(after.pollers.len());
    for now in &after.pollers {
        let then = earlier.get_mut(&(now.thread_id, now.name.as_str())).and_then(Vec::pop);
        let same = then.filter(|then| then.polls <= now.polls && then.found <= now.found);
        let (polls, found) = same.map_or((0, 0), |then| (then.polls, then.found));
        let more = now.polls - polls;
        rates.push(PollerRates {
            polls: per_second(polls, now.polls, span_ns),
            found_percent: (more > 0).then(|| capped_percent(now.found - found, more)),
        });
    }
    rates
}

/// Rate per second; 0 for a span of zero.
fn per_second(then: u64, now: u64, span_ns: u64) -> f64 {
    // A counter that decreased was restarted.
    let more = now.checked_sub(then).unwrap_or(now);
    if span_ns == 0 { 0.0 } else { to_f64(more) * 1e9 / to_f64(span_ns) }
}

/// Percentage, at most 100: an interval that began before the span is counted in full when it ends.
fn capped_percent(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { (to_f64(part) * 100.0 / to_f64(whole)).min(100.0) }
}

#[expect(clippy::cast_precision_loss, reason = "shown to people")]
fn to_f64(number: u64) -> f64 {
    number as f64
}

#[cfg(test)]
mod tests {
    use super::{ReactorRates, rates_between};
    use crate::top::process_sample::{PollerSample, ProcessSample, ReactorSample, ThreadSample};

    const SECOND: u64 = 1_000_000_000;

    fn test_sample(monotonic_ns: u64, reactor: ReactorSample) -> ProcessSample {
        ProcessSample { monotonic_ns, reactors: vec![reactor], ..ProcessSample::default() }
    }

    fn test_poller(name: &str, polls: u64, found: u64) -> PollerSample {
        PollerSample { name: name.into(), polls, found, ..PollerSample::default() }
    }

    fn assert_close(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-9, "{found} is not {expected}");
    }

    #[test]
    fn rates_are_differences_per_second() {
        let then = ReactorSample {
            busy_ns: 7,
            iterations: 10,
            sleeps: 5,
            messages: 1,
            ..ReactorSample::default()
        };
        let now = ReactorSample {
            busy_ns: 7 + SECOND / 2,
            iterations: 30,
            sleeps: 6,
            messages: 101,
            migrations: 4,
            ..ReactorSample::default()
        };
        let found = rates_between(&test_sample(SECOND, then), &test_sample(3 * SECOND, now));
        assert_eq!(found.span_ns, 2 * SECOND);
        let expected = ReactorRates {
            busy_percent: 25.0,
            iterations: 10.0,
            sleeps: 0.5,
            messages: 50.0,
            migrations: 2.0,
            is_stuck: false,
        };
        assert_eq!(found.reactors, [expected]);
        assert_close(found.whole.messages, 50.0);
    }

    #[test]
    fn total_is_the_sum_of_all_reactors() {
        let busy =
            |id, busy_ns| ReactorSample { id, busy_ns, sleeps: 3, ..ReactorSample::default() };
        let before = ProcessSample { monotonic_ns: 1, ..ProcessSample::default() };
        let reactors = vec![busy(0, SECOND), busy(1, SECOND / 2)];
        let found = rates_between(
            &before,
            &ProcessSample { monotonic_ns: 1 + SECOND, reactors, ..ProcessSample::default() },
        );
        assert_close(found.whole.busy_percent, 75.0);
        assert_close(found.whole.sleeps, 6.0);
        assert_close(rates_between(&before, &before).whole.busy_percent, 0.0);
    }

    #[test]
    fn new_or_replaced_threads_start_at_zero() {
        let then = ReactorSample {
            busy_ns: SECOND,
            iterations: 900,
            sleeps: 50,
            ..ReactorSample::default()
        };
        let now = ReactorSample {
            busy_ns: SECOND / 10,
            iterations: 9,
            sleeps: 60,
            ..ReactorSample::default()
        };
        let found = rates_between(&test_sample(0, then.clone()), &test_sample(SECOND, now.clone()))
            .reactors[0];
        assert_close(found.busy_percent, 10.0);
        assert_close(found.iterations, 9.0);
        assert_close(found.sleeps, 60.0);
        assert!(!found.is_stuck);
        let new = ReactorSample { id: 7, ..now };
        assert_close(
            rates_between(&test_sample(0, then), &test_sample(SECOND, new)).reactors[0].iterations,
            9.0,
        );
    }

    #[test]
    fn late_reported_iteration_does_not_exceed_100_percent() {
        let now = ReactorSample { busy_ns: 9 * SECOND, iterations: 1, ..ReactorSample::default() };
        let found =
            rates_between(&test_sample(0, ReactorSample::default()), &test_sample(SECOND, now));
        assert_close(found.reactors[0].busy_percent, 100.0);
    }

    #[test]
    fn reactor_without_iteration_progress_is_stuck_unless_asleep() {
        let at = |sleeping, iterations| ReactorSample {
            sleeping,
            iterations,
            ..ReactorSample::default()
        };
        let stuck = |then, now| {
            rates_between(&test_sample(0, then), &test_sample(SECOND, now)).reactors[0].is_stuck
        };
        assert!(stuck(at(false, 5), at(false, 5)));
        assert!(!stuck(at(true, 5), at(true, 5)) && !stuck(at(false, 5), at(true, 5)));
        assert!(!stuck(at(false, 5), at(false, 6)));
    }

    #[test]
    fn threads_are_matched_by_number_and_name_on_any_reactor() {
        let thread = |id, name: &str, busy_ns| ThreadSample {
            id,
            name: name.into(),
            busy_ns,
            messages: busy_ns,
            ..ThreadSample::default()
        };
        let threads = |monotonic_ns, threads| ProcessSample {
            monotonic_ns,
            threads,
            ..ProcessSample::default()
        };
        let before = threads(0, vec![thread(1, "a", 100), thread(2, "b", 0)]);
        let after = threads(SECOND, vec![thread(2, "b", SECOND), thread(1, "c", 200)]);
        let found = rates_between(&before, &after).threads;
        assert_close(found[0].busy_percent, 100.0);
        assert_close(found[1].messages, 200.0);
    }

    #[test]
    fn pollers_of_the_same_name_are_matched_by_order() {
        let sample = |monotonic_ns, pollers| ProcessSample {
            monotonic_ns,
            pollers,
            ..ProcessSample::default()
        };
        let before = sample(0, vec![test_poller("p", 100, 0), test_poller("p", 10, 10)]);
        let after = sample(SECOND, vec![test_poller("p", 200, 25), test_poller("p", 10, 10)]);
        let found = rates_between(&before, &after).pollers;
        assert_close(found[0].polls, 100.0);
        assert_eq!(found[0].found_percent, Some(25.0));
        assert_close(found[1].polls, 0.0);
        assert_eq!(found[1].found_percent, None);
    }

    #[test]
    fn samples_at_the_same_time_have_zero_rates() {
        let now =
            ReactorSample { busy_ns: 5, iterations: 5, sleeps: 5, ..ReactorSample::default() };
        let found = rates_between(&test_sample(9, ReactorSample::default()), &test_sample(9, now))
            .reactors[0];
        assert_eq!((found.busy_percent, found.iterations, found.sleeps), (0.0, 0.0, 0.0));
    }
}
