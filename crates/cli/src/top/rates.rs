//! Rates per second between two samples.

use std::collections::BTreeMap;

use super::sample::{Poller, Reactor, Sample, Thread};

/// Rates between two samples. Lists are in the order of the later sample.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Rates {
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
pub(crate) fn rates(before: &Sample, after: &Sample) -> Rates {
    let span_ns = after.monotonic_ns.saturating_sub(before.monotonic_ns);
    let reactors: Vec<_> = after
        .reactors
        .iter()
        .map(|now| of_reactor(before.reactors.iter().find(|then| then.id == now.id), now, span_ns))
        .collect();
    let earlier: BTreeMap<u32, &Thread> = before.threads.iter().map(|it| (it.id, it)).collect();
    let thread = |now: &Thread| of_thread(earlier.get(&now.id).copied(), now, span_ns);
    let sum = |part: fn(&ReactorRates) -> f64| {
        reactors.iter().map(part).fold(0.0, |sum, part| sum + part)
    };
    let whole = TotalRates {
        busy_percent: sum(|it| it.busy_percent) / real(reactors.len().max(1) as u64),
        sleeps: sum(|it| it.sleeps),
        messages: sum(|it| it.messages),
        migrations: sum(|it| it.migrations),
    };
    let threads = after.threads.iter().map(thread).collect();
    Rates { span_ns, whole, reactors, threads, pollers: of_pollers(before, after, span_ns) }
}

fn of_reactor(then: Option<&Reactor>, now: &Reactor, span_ns: u64) -> ReactorRates {
    let same = then.filter(|then| then.iterations <= now.iterations && then.busy_ns <= now.busy_ns);
    let nought = Reactor::default();
    let then = same.unwrap_or(&nought);
    let rate = |part: fn(&Reactor) -> u64| per_second(part(then), part(now), span_ns);
    ReactorRates {
        busy_percent: percent(now.busy_ns - then.busy_ns, span_ns),
        iterations: rate(|it| it.iterations),
        sleeps: rate(|it| it.sleeps),
        messages: rate(|it| it.messages),
        migrations: rate(|it| it.migrations),
        is_stuck: same.is_some_and(|then| {
            then.iterations == now.iterations && !then.sleeping && !now.sleeping
        }),
    }
}

fn of_thread(then: Option<&Thread>, now: &Thread, span_ns: u64) -> ThreadRates {
    let same = then.filter(|then| then.name == now.name && then.busy_ns <= now.busy_ns);
    let nought = Thread::default();
    let then = same.unwrap_or(&nought);
    ThreadRates {
        busy_percent: percent(now.busy_ns - then.busy_ns, span_ns),
        messages: per_second(then.messages, now.messages, span_ns),
    }
}

/// Pollers are matched by thread, name, and position among those of the same name.
fn of_pollers(before: &Sample, after: &Sample, span_ns: u64) -> Vec<PollerRates> {
    let mut earlier: BTreeMap<(u32, &str), Vec<&Poller>> = BTreeMap::new();
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
            found_percent: (more > 0).then(|| percent(now.found - found, more)),
        });
    }
    rates
}

/// Rate per second; 0 for a span of zero.
fn per_second(then: u64, now: u64, span_ns: u64) -> f64 {
    // A counter that decreased was restarted.
    let more = now.checked_sub(then).unwrap_or(now);
    if span_ns == 0 { 0.0 } else { real(more) * 1e9 / real(span_ns) }
}

/// Percentage, at most 100: an interval that began before the span is counted in full when it ends.
fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { (real(part) * 100.0 / real(whole)).min(100.0) }
}

#[expect(clippy::cast_precision_loss, reason = "shown to people")]
fn real(number: u64) -> f64 {
    number as f64
}

#[cfg(test)]
mod tests {
    use super::{ReactorRates, rates};
    use crate::top::sample::{Poller, Reactor, Sample, Thread};

    const SECOND: u64 = 1_000_000_000;

    fn sample(monotonic_ns: u64, reactor: Reactor) -> Sample {
        Sample { monotonic_ns, reactors: vec![reactor], ..Sample::default() }
    }

    fn poller(name: &str, polls: u64, found: u64) -> Poller {
        Poller { name: name.into(), polls, found, ..Poller::default() }
    }

    fn close(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-9, "{found} is not {expected}");
    }

    #[test]
    fn rates_are_what_happened_by_the_second() {
        let then =
            Reactor { busy_ns: 7, iterations: 10, sleeps: 5, messages: 1, ..Reactor::default() };
        let now = Reactor {
            busy_ns: 7 + SECOND / 2,
            iterations: 30,
            sleeps: 6,
            messages: 101,
            migrations: 4,
            ..Reactor::default()
        };
        let found = rates(&sample(SECOND, then), &sample(3 * SECOND, now));
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
        close(found.whole.messages, 50.0);
    }

    #[test]
    fn the_whole_is_all_reactors_together() {
        let busy = |id, busy_ns| Reactor { id, busy_ns, sleeps: 3, ..Reactor::default() };
        let before = Sample { monotonic_ns: 1, ..Sample::default() };
        let reactors = vec![busy(0, SECOND), busy(1, SECOND / 2)];
        let found =
            rates(&before, &Sample { monotonic_ns: 1 + SECOND, reactors, ..Sample::default() });
        close(found.whole.busy_percent, 75.0);
        close(found.whole.sleeps, 6.0);
        close(rates(&before, &before).whole.busy_percent, 0.0);
    }

    #[test]
    fn who_is_new_or_was_replaced_began_with_nought() {
        let then = Reactor { busy_ns: SECOND, iterations: 900, sleeps: 50, ..Reactor::default() };
        let now = Reactor { busy_ns: SECOND / 10, iterations: 9, sleeps: 60, ..Reactor::default() };
        let found = rates(&sample(0, then.clone()), &sample(SECOND, now.clone())).reactors[0];
        close(found.busy_percent, 10.0);
        close(found.iterations, 9.0);
        close(found.sleeps, 60.0);
        assert!(!found.is_stuck);
        let new = Reactor { id: 7, ..now };
        close(rates(&sample(0, then), &sample(SECOND, new)).reactors[0].iterations, 9.0);
    }

    #[test]
    fn a_turn_that_was_told_late_is_not_more_than_all_of_the_time() {
        let now = Reactor { busy_ns: 9 * SECOND, iterations: 1, ..Reactor::default() };
        let found = rates(&sample(0, Reactor::default()), &sample(SECOND, now));
        close(found.reactors[0].busy_percent, 100.0);
    }

    #[test]
    fn no_turn_while_awake_is_stuck_and_asleep_is_not() {
        let at = |sleeping, iterations| Reactor { sleeping, iterations, ..Reactor::default() };
        let stuck = |then, now| rates(&sample(0, then), &sample(SECOND, now)).reactors[0].is_stuck;
        assert!(stuck(at(false, 5), at(false, 5)));
        assert!(!stuck(at(true, 5), at(true, 5)) && !stuck(at(false, 5), at(true, 5)));
        assert!(!stuck(at(false, 5), at(false, 6)));
    }

    #[test]
    fn threads_are_known_by_number_and_name_wherever_they_stand() {
        let thread = |id, name: &str, busy_ns| Thread {
            id,
            name: name.into(),
            busy_ns,
            messages: busy_ns,
            ..Thread::default()
        };
        let threads = |monotonic_ns, threads| Sample { monotonic_ns, threads, ..Sample::default() };
        let before = threads(0, vec![thread(1, "a", 100), thread(2, "b", 0)]);
        let after = threads(SECOND, vec![thread(2, "b", SECOND), thread(1, "c", 200)]);
        let found = rates(&before, &after).threads;
        close(found[0].busy_percent, 100.0);
        close(found[1].messages, 200.0);
    }

    #[test]
    fn pollers_of_one_name_are_told_apart_by_their_order() {
        let sample = |monotonic_ns, pollers| Sample { monotonic_ns, pollers, ..Sample::default() };
        let before = sample(0, vec![poller("p", 100, 0), poller("p", 10, 10)]);
        let after = sample(SECOND, vec![poller("p", 200, 25), poller("p", 10, 10)]);
        let found = rates(&before, &after).pollers;
        close(found[0].polls, 100.0);
        assert_eq!(found[0].found_percent, Some(25.0));
        close(found[1].polls, 0.0);
        assert_eq!(found[1].found_percent, None);
    }

    #[test]
    fn two_samples_of_one_moment_have_no_rates_and_no_nonsense() {
        let now = Reactor { busy_ns: 5, iterations: 5, sleeps: 5, ..Reactor::default() };
        let found = rates(&sample(9, Reactor::default()), &sample(9, now)).reactors[0];
        assert_eq!((found.busy_percent, found.iterations, found.sleeps), (0.0, 0.0, 0.0));
    }
}
