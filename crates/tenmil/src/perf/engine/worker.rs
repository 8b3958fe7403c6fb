//! One submitting thread: its lanes, turned one after the other until the time is over.

use base::{Instant, Span};
use host::Clock;

use super::lane::{Lane, Sums};
use super::scrutiny::Scrutiny;
use crate::perf::arrivals::Arrivals;
use crate::perf::options::OpenLoop;
use crate::perf::outcome::{Counts, Ended, Turns, Verified};
use crate::perf::progress::{Phase, Progress};
use crate::perf::workload::Workload;

/// A submitting thread, before it runs.
pub(super) struct Worker<S> {
    pub(super) lanes: Vec<LaneOf<S>>,
    pub(super) workload: Workload,
    pub(super) clock: Clock,
    pub(super) plan: Plan,
    /// Its number among the submitting threads.
    pub(super) index: usize,
}

/// A lane and the SSD that it loads.
pub(super) struct LaneOf<S> {
    pub(super) lane: Lane<S>,
    pub(super) device: usize,
    /// Where a rate was asked for, this lane's part of it.
    pub(super) rate: Option<RateShare>,
    /// Made from it when the thread starts.
    pub(super) arrivals: Option<Arrivals>,
}

/// One lane's part of a rate.
#[derive(Clone, Copy, Debug)]
pub(super) struct RateShare {
    pub(super) rate: OpenLoop,
    pub(super) part: u64,
    pub(super) parts: u64,
    pub(super) seed: u64,
}

/// When to do what.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub(super) warm_up: Span,
    pub(super) time: Span,
    /// Whether the other side needs this processor too.
    pub(super) gives_way: bool,
}

/// What a submitting thread has found out.
pub(super) struct Share {
    pub(super) lanes: Vec<LaneShare>,
    pub(super) elapsed: Span,
    pub(super) ticks: u64,
    pub(super) ended: Ended,
    /// I/Os and bytes in each interval.
    pub(super) series: Vec<(u64, u64)>,
    /// I/Os that had arrived and were not yet started at the end.
    pub(super) backlog: u64,
    /// I/Os that had still not been answered when the wait for them was over.
    pub(super) unanswered: u64,
}

/// What one lane has done.
pub(super) struct LaneShare {
    pub(super) device: usize,
    pub(super) sums: Sums,
    pub(super) turns: Turns,
    pub(super) verified: Option<Verified>,
}

/// One point of the series.
pub(super) const INTERVAL: Span = Span::from_ms(100);

/// The clock is read once in so many rounds for everything that is not a latency.
const ROUNDS_PER_LOOK: u32 = 8;

/// How long I/Os in flight are waited for at the end.
const DRAIN: Span = Span::from_secs(5);

impl<S: Scrutiny> Worker<S> {
    /// Runs to the end, and gives the lanes back so that their queue pairs can be deleted.
    pub(super) fn run(mut self, progress: &Progress) -> Share {
        let mut now = self.clock.now();
        let begun = now;
        for LaneOf { lane, rate, arrivals, .. } in &mut self.lanes {
            *arrivals = rate.map(|RateShare { rate, part, parts, seed }| {
                Arrivals::new(rate, part, parts, now, seed)
            });
            if arrivals.is_none() {
                lane.fill(now, &mut self.workload);
            }
        }
        let mut round = Rounds { mark: begun.after(INTERVAL), seen: (0, 0), series: Vec::new() };
        let mut ended = self.turn_until(begun.after(self.plan.warm_up), &mut round, progress);
        now = self.clock.now();
        let doorbells: Vec<Turns> = self.lanes.iter().map(|lane| lane.lane.turns()).collect();
        self.lanes.iter_mut().for_each(|lane| lane.lane.clear());
        let (start, start_ticks) = (now, self.clock.ticks());
        if ended == Ended::Time {
            progress.enter(Phase::Measure);
            round = Rounds { mark: now.after(INTERVAL), seen: (0, 0), series: Vec::new() };
            ended = self.turn_until(start.after(self.plan.time), &mut round, progress);
        }
        let (end, end_ticks) = (self.clock.now(), self.clock.ticks());
        let lanes: Vec<LaneShare> = self
            .lanes
            .iter()
            .zip(doorbells)
            .map(|(of, before)| LaneShare {
                device: of.device,
                sums: of.lane.sums(),
                turns: of.lane.turns().since(&before),
                verified: None,
            })
            .collect();
        let backlog = self.lanes.iter().filter_map(|of| of.arrivals.as_ref());
        let mut share = Share {
            lanes,
            elapsed: end.since(start),
            ticks: end_ticks.saturating_sub(start_ticks),
            ended,
            series: round.series,
            backlog: backlog.map(|arrivals| arrivals.backlog(end)).sum(),
            unanswered: 0,
        };
        share.unanswered = self.drain();
        for (of, lane) in self.lanes.iter().zip(&mut share.lanes) {
            lane.verified = of.lane.scrutiny().verified();
        }
        share
    }

    /// Turns all lanes until `end`, or until there is nothing more to do.
    fn turn_until(&mut self, end: Instant, round: &mut Rounds, progress: &Progress) -> Ended {
        let mut now = self.clock.now();
        loop {
            for _ in 0..ROUNDS_PER_LOOK {
                let mut ended = 0;
                for of in &mut self.lanes {
                    ended += match &mut of.arrivals {
                        None => of.lane.turn(now, &self.clock, &mut self.workload),
                        Some(arrivals) => {
                            of.lane.turn_open(now, &self.clock, &mut self.workload, arrivals)
                        }
                    };
                }
                if ended == 0 && self.plan.gives_way {
                    host::thread::give_way();
                }
            }
            now = self.clock.now();
            if now >= round.mark {
                self.look_around(now, round, progress);
                if progress.is_stopping() {
                    return Ended::Interrupt;
                }
            }
            if now >= end {
                return Ended::Time;
            }
            if self.lanes.iter().all(|of| of.lane.is_done()) {
                return Ended::Count;
            }
        }
    }

    /// Ten times a second: writes down how far it has come.
    #[cold]
    fn look_around(&self, now: Instant, round: &mut Rounds, progress: &Progress) {
        let mut counts = Counts::default();
        self.lanes.iter().for_each(|of| counts.merge(&of.lane.counts()));
        let Counts { ios, bytes, errors, .. } = counts;
        progress.thread(self.index).set(ios, bytes, errors);
        while now >= round.mark {
            round.series.push((ios - round.seen.0, bytes - round.seen.1));
            round.seen = (ios, bytes);
            round.mark = round.mark.after(INTERVAL);
        }
    }

    /// Waits for what is in flight; returns how many I/Os were given up on.
    fn drain(&mut self) -> u64 {
        let end = self.clock.now().after(DRAIN);
        loop {
            let now = self.clock.now();
            self.lanes.iter_mut().for_each(|of| of.lane.drain(now));
            let left: u64 = self.lanes.iter().map(|of| u64::from(of.lane.in_flight())).sum();
            if left == 0 || now >= end {
                return left;
            }
            host::thread::give_way();
        }
    }
}

/// The series, as it is written.
struct Rounds {
    /// When the present interval ends.
    mark: Instant,
    /// I/Os and bytes up to the last mark.
    seen: (u64, u64),
    series: Vec<(u64, u64)>,
}
