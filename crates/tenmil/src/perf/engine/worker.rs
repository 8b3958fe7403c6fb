//! One submitting thread: a poller on a reactor that turns its lanes until the time is over.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use base::{Instant, Span};
use host::Clock;
use host::watch::{Interest, Watch};
use reactor::{Context, Found, Poller, WokenBy};

use super::lane::{Bounds, Lane, Sums};
use super::places::Places;
use super::scrutiny::Scrutiny;
use crate::perf::arrivals::Arrivals;
use crate::perf::options::{OpenLoop, PerfOptions};
use crate::perf::outcome::{Counts, Ended, Turns, Verified};
use crate::perf::progress::{Phase, Progress};
use crate::perf::workload::Workload;

/// A submitting thread. It ends the light thread that it lives on when it has told what it found.
pub(super) struct Worker<S> {
    lanes: Vec<LaneOf<S>>,
    workload: Workload,
    clock: Clock,
    plan: Plan,
    /// Its number among the submitting threads.
    index: usize,
    progress: Arc<Progress>,
    tell: Sender<Share>,
    stage: Stage,
    /// The next time at which there is more to do than to turn lanes.
    look_at: Instant,
    series: Series,
    /// What an I/O takes on average, and how many there are in flight.
    latency: Span,
}

/// What a submitting thread is made of.
pub(super) struct WorkerParts<S> {
    pub(super) lanes: Vec<LaneOf<S>>,
    pub(super) workload: Workload,
    pub(super) clock: Clock,
    pub(super) plan: Plan,
    pub(super) index: usize,
    pub(super) progress: Arc<Progress>,
    pub(super) tell: Sender<Share>,
}

/// How far a worker has come.
enum Stage {
    /// Nothing has been submitted.
    Begin,
    /// Running, not yet counting.
    WarmUp { until: Instant },
    /// Counting.
    Measure { since: Instant, ticks: u64, until: Instant, before: Vec<Turns> },
    /// Starting nothing new, and waiting for what is in flight.
    Drain { until: Instant, share: Box<Share> },
    /// All is told.
    Over,
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

impl Plan {
    /// What `options` ask for.
    pub(super) fn new(options: &PerfOptions, places: &Places) -> Self {
        Self {
            warm_up: if options.io_count.is_some() { Span { ns: 0 } } else { options.warm_up },
            time: options.time,
            gives_way: places.gives_way,
        }
    }
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

/// How often lanes are turned before a poll has found nothing: a look is several times cheaper than
/// the turn of a reactor around it, and what comes in between is met sooner.
const LOOKS: u32 = 8;

/// How often lanes are turned in one poll while they find something, and with how many I/Os found a
/// poll is over: the turn of a reactor costs as much as two I/Os, and its messages can wait for so
/// many.
const ROUNDS: u32 = 32;
const ENOUGH: usize = 32;

/// The same for a lane that goes alone.
const ALONE: Bounds = Bounds { ios: ENOUGH as u64, looks: LOOKS as u64 };

/// How long I/Os in flight are waited for at the end.
const DRAIN: Span = Span::from_secs(5);

impl<S: Scrutiny> Worker<S> {
    /// A worker that has not begun.
    pub(super) fn new(parts: WorkerParts<S>) -> Self {
        let WorkerParts { lanes, workload, clock, plan, index, progress, tell } = parts;
        Self {
            lanes,
            workload,
            clock,
            plan,
            index,
            progress,
            tell,
            stage: Stage::Begin,
            look_at: Instant::default(),
            series: Series::default(),
            latency: Span::default(),
        }
    }

    /// What wakes it: any of its lanes. Nothing, if there is one that wakes nobody.
    pub(super) fn woken_by(&self) -> io::Result<WokenBy> {
        if let [of] = self.lanes.as_slice() {
            return WokenBy::of(of.lane.wake_source());
        }
        let watch = Watch::new()?;
        for (token, of) in (0..).zip(&self.lanes) {
            match of.lane.wake_source() {
                base::WakeSource::Descriptor(descriptor) => {
                    watch.add(descriptor, token, Interest { readable: true, writable: false })?;
                }
                base::WakeSource::Deadline => {}
                base::WakeSource::Nothing => return Ok(WokenBy::Nothing),
            }
        }
        Ok(WokenBy::Descriptor(watch.into()))
    }

    /// Whether the kernel of this machine carries out all I/O of all its lanes.
    pub(super) fn is_done_by_kernel(&self) -> bool {
        self.lanes.iter().all(|of| of.lane.is_done_by_kernel())
    }

    fn begin(&mut self, now: Instant) {
        for LaneOf { lane, rate, arrivals, .. } in &mut self.lanes {
            *arrivals = rate.map(|RateShare { rate, part, parts, seed }| {
                Arrivals::new(rate, part, parts, now, seed)
            });
            if arrivals.is_none() {
                lane.fill(now, &mut self.workload);
            }
        }
        self.series = Series::from(now);
        self.stage = Stage::WarmUp { until: now.after(self.plan.warm_up) };
        self.look_around(now);
    }

    /// Turns each lane once. Returns how many I/Os ended or started, and the time as it was read
    /// last.
    #[inline]
    fn round(&mut self, mut now: Instant) -> (usize, Instant) {
        let mut found = 0;
        for of in &mut self.lanes {
            let count;
            (count, now) = match &mut of.arrivals {
                None => of.lane.turn(now, &self.clock, &mut self.workload),
                Some(arrivals) => of.lane.turn_open(now, &self.clock, &mut self.workload, arrivals),
            };
            found += count;
        }
        (found, now)
    }

    /// Turns lanes for as long as they find something and it is not enough, or until some looks
    /// have found nothing.
    #[inline]
    fn rounds(&mut self, mut now: Instant) -> (usize, Instant) {
        if let [LaneOf { lane, arrivals: None, .. }] = self.lanes.as_mut_slice()
            && lane.goes_alone()
        {
            return lane.turns_alone(now, &self.clock, &mut self.workload, ALONE);
        }
        let (mut found, mut looks) = (0, 0);
        for _ in 0..ROUNDS {
            let count;
            (count, now) = self.round(now);
            found += count;
            looks += u32::from(count == 0);
            let is_over = if found > 0 { count == 0 || found >= ENOUGH } else { looks >= LOOKS };
            if is_over {
                break;
            }
        }
        (found, now)
    }

    /// Everything but turning lanes: the time has come for some of it.
    #[cold]
    fn look_around(&mut self, now: Instant) {
        if now >= self.series.mark {
            self.publish(now);
        }
        let (is_stopping, is_done) = (self.progress.is_stopping(), self.is_done());
        let is_over = is_stopping || is_done;
        if matches!(self.stage, Stage::WarmUp { until } if is_over || now >= until) {
            self.measure(now);
        }
        match self.stage {
            Stage::Measure { until, .. } if now >= until => self.finish(now, Ended::Time),
            Stage::Measure { .. } if is_stopping => self.finish(now, Ended::Interrupt),
            Stage::Measure { .. } if is_done => self.finish(now, Ended::Count),
            Stage::WarmUp { until } | Stage::Measure { until, .. } => {
                self.look_at = self.series.mark.min(until);
            }
            Stage::Begin | Stage::Drain { .. } | Stage::Over => {}
        }
    }

    /// The warm-up is over: what was counted is forgotten.
    fn measure(&mut self, now: Instant) {
        let before = self.lanes.iter().map(|of| of.lane.turns()).collect();
        self.lanes.iter_mut().for_each(|of| of.lane.clear());
        self.progress.enter(Phase::Measure);
        self.series = Series::from(now);
        let ticks = self.clock.ticks();
        let until = now.after(self.plan.time);
        self.stage = Stage::Measure { since: now, ticks, until, before };
    }

    /// The measurement is over: its results are put together, and what is in flight is waited for.
    fn finish(&mut self, now: Instant, ended: Ended) {
        let stage = std::mem::replace(&mut self.stage, Stage::Over);
        let Stage::Measure { since, ticks, before, .. } = stage else { return };
        let lanes = self.lanes.iter().zip(before).map(|(of, before)| LaneShare {
            device: of.device,
            sums: of.lane.sums(),
            turns: of.lane.turns().since(&before),
            verified: None,
        });
        let backlog = self.lanes.iter().filter_map(|of| of.arrivals.as_ref());
        let share = Share {
            lanes: lanes.collect(),
            elapsed: now.since(since),
            ticks: self.clock.ticks().saturating_sub(ticks),
            ended,
            series: std::mem::take(&mut self.series.points),
            backlog: backlog.map(|arrivals| arrivals.backlog(now)).sum(),
            unanswered: 0,
        };
        self.stage = Stage::Drain { until: now.after(DRAIN), share: Box::new(share) };
        self.look_at = now;
    }

    /// Takes what comes back; tells everything when nothing more does.
    fn drain(&mut self, context: &mut Context<'_>) {
        let now = context.now();
        self.lanes.iter_mut().for_each(|of| of.lane.drain(now));
        let left: u64 = self.lanes.iter().map(|of| u64::from(of.lane.in_flight())).sum();
        let Stage::Drain { until, share } = &mut self.stage else { return };
        if left > 0 && now < *until {
            return;
        }
        share.unanswered = left;
        for (of, lane) in self.lanes.iter().zip(&mut share.lanes) {
            lane.verified = of.lane.scrutiny().verified();
        }
        if let Stage::Drain { share, .. } = std::mem::replace(&mut self.stage, Stage::Over) {
            // Nobody listens any more only if the run was given up.
            let _ = self.tell.send(*share);
        }
        context.end();
    }

    /// Ten times a second: writes down how far it has come.
    fn publish(&mut self, now: Instant) {
        let mut counts = Counts::default();
        self.lanes.iter().for_each(|of| counts.merge(&of.lane.counts()));
        let Counts { ios, bytes, errors, .. } = counts;
        self.progress.thread(self.index).set(ios, bytes, errors);
        self.series.add(now, (ios, bytes));
        let in_flight: u64 = self.lanes.iter().map(|of| u64::from(of.lane.in_flight())).sum();
        let rate = self.series.last().map_or(0, |(ios, _)| ios);
        self.latency = Span { ns: (INTERVAL.ns * in_flight).checked_div(rate).unwrap_or(0) };
    }

    fn is_done(&self) -> bool {
        self.lanes.iter().all(|of| of.lane.is_done())
    }
}

impl<S: Scrutiny + Send> Poller for Worker<S> {
    #[inline]
    fn poll(&mut self, context: &mut Context<'_>) -> Found {
        let now = context.now();
        let (found, now) = match self.stage {
            Stage::WarmUp { .. } | Stage::Measure { .. } => self.rounds(now),
            Stage::Begin => {
                self.begin(now);
                return Found::Work;
            }
            Stage::Drain { .. } => {
                self.drain(context);
                return Found::Work;
            }
            Stage::Over => (0, now),
        };
        if now >= self.look_at || found == 0 && self.is_done() {
            self.look_around(now);
        }
        if found == 0 && self.plan.gives_way {
            host::thread::give_way();
        }
        Found::from_count(found)
    }

    fn arm(&mut self) -> Found {
        // All of them: each has to be ready to wake this thread.
        let working = self.lanes.iter_mut().filter_map(|of| of.lane.arm().then_some(())).count();
        Found::from_count(working)
    }

    fn disarm(&mut self) {
        self.lanes.iter_mut().for_each(|of| of.lane.disarm());
    }

    fn wake_at(&self) -> Instant {
        let lanes = self.lanes.iter().map(|of| {
            let arrival = of.arrivals.as_ref().map_or(Instant::NEVER, Arrivals::next_due);
            of.lane.wake_at().min(arrival)
        });
        lanes.min().unwrap_or(Instant::NEVER).min(self.look_at)
    }

    fn expected_latency(&self) -> Option<Span> {
        let in_flight = self.lanes.iter().any(|of| of.lane.in_flight() > 0);
        (in_flight && self.latency.ns > 0).then_some(self.latency)
    }
}

/// I/Os and bytes in each interval, as they are written down.
#[derive(Default)]
struct Series {
    /// When the present interval ends.
    mark: Instant,
    /// I/Os and bytes up to the last mark.
    seen: (u64, u64),
    points: Vec<(u64, u64)>,
}

impl Series {
    /// A series that begins at `now`.
    fn from(now: Instant) -> Self {
        Self { mark: now.after(INTERVAL), ..Self::default() }
    }

    /// Ends every interval that `now` is past; `sums` are I/Os and bytes since the beginning.
    fn add(&mut self, now: Instant, sums: (u64, u64)) {
        while now >= self.mark {
            self.points.push((sums.0 - self.seen.0, sums.1 - self.seen.1));
            self.seen = sums;
            self.mark = self.mark.after(INTERVAL);
        }
    }

    /// The last interval that has ended.
    fn last(&self) -> Option<(u64, u64)> {
        self.points.last().copied()
    }
}
