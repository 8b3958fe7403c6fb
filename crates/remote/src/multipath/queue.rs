//! A namespace that several paths lead to, as a block device: a way for each path, and requests that
//! are kept until one of them has answered.
//!
//! ```text
//!   submit ─▶ kept ─▶ route ─┬─▶ way 0 ─▶ connection
//!                            └─▶ way 1 ─▶ connection
//!   poll   ◀─ kept ◀─ fate ◀─┴── answers, or a connection that is gone
//!               └── sent again by another way, at once or when it may (see `fate`)
//! ```

use std::sync::Arc;

use base::{
    Answer, Answers, Backend, DoorbellCounts, Durability, Instant, Limits, Operation, Outcome,
    Request, Segment, Span, WakeSource,
};
use nvme::Order;

use super::MultipathOptions;
use super::fate::{self, Fate};
use super::route::{Route, View};
use super::standings::{Desk, Standings};
use crate::caches::Association;
use crate::flushes::{self, Flushes, Goes, Reach, Worth};
use crate::kept::{Broken, Cut, Kept};
use crate::sleep::Sleep;
use crate::way::{Condition, Way};

/// A queue pair with its connection for each path.
///
/// What is submitted is sent in the same turn, by the [`flush`](Backend::flush) that follows. When a
/// path is lost, what was under way there goes elsewhere as soon as it may: reads at once, whatever
/// changes a block when the old controller can do nothing of it any more. When no path is left,
/// requests are held for the policy's time to [fail fast](crate::Policy::fail_fast), and end with
/// [`Outcome::PATH_ERROR`] from then on.
///
/// A flush goes to each controller that may have answered writes in a volatile cache, whichever queue
/// they took, and is answered when all have answered it. What controllers had that are lost by then is
/// for [`Cache`](crate::Cache) to say.
pub struct MultipathQueue {
    shared: Arc<Standings>,
    desk: Arc<Desk>,
    /// The number of the news that was heeded last.
    heeded: u32,
    lanes: Box<[PathLane]>,
    views: Box<[View]>,
    route: Route,
    kept: Kept,
    flushes: Flushes,
    /// Answered writes may lie in a volatile cache.
    has_cache: bool,
    limits: Limits,
    fail_fast: Span,
    /// Since when there is no path.
    down_since: Option<Instant>,
    /// Some path rests.
    has_resting: bool,
    /// Answers to what was not even tried, or is not tried once more.
    failed: Vec<Answer>,
    sleep: Option<Box<dyn Sleep>>,
}

/// A path, from one queue.
struct PathLane {
    way: Option<Way>,
    /// What it was when it was looked at last.
    condition: Condition,
    /// How its connection has gone last.
    cut: Option<Cut>,
    /// Until when nothing takes it, if it rests.
    rests_until: Instant,
    /// Requests that it still owes an answer to, and nobody waits for it.
    stale: u32,
    /// Requests under the numbers of their slots, on their way.
    batch: Vec<Request>,
    /// Something was submitted and not sent.
    is_dirty: bool,
    /// The way of a later controller, for when this one owes nothing.
    next: Option<Way>,
}

/// Requests that go to the queue pairs in one go.
const BATCH: usize = 64;
/// For how long a path is left alone on which something went wrong.
const REST: Span = Span::from_ms(100);

impl MultipathQueue {
    /// A queue over the ways that have come to `desk`. `None` if there is none yet.
    pub(super) fn new(
        shared: Arc<Standings>,
        desk: Arc<Desk>,
        count: usize,
        wishes: &MultipathOptions,
    ) -> Option<Self> {
        let ways = desk.take();
        let limits = ways.first()?.1.limits().clone();
        // Beside the commands in flight there are requests that were split.
        let depth = limits.depth_max + u32::from(wishes.sizes.parents);
        let has_cache = limits.durability == Durability::VolatileCache;
        let mut queue = Self {
            heeded: shared.word(),
            flushes: Flushes::new(Arc::clone(shared.caches()), has_cache),
            has_cache,
            shared,
            desk,
            lanes: (0..count).map(|_| PathLane::new()).collect(),
            views: vec![View::default(); count].into(),
            route: Route::new(wishes.spread),
            kept: Kept::new(depth),
            limits,
            fail_fast: wishes.options.policy.fail_fast,
            down_since: None,
            has_resting: false,
            failed: Vec::new(),
            sleep: None,
        };
        ways.into_iter().for_each(|(path, way)| queue.welcome(path, way));
        queue.heed();
        Some(queue)
    }

    /// What its thread sleeps on. Without it, a thread cannot sleep while the queue owes an answer.
    #[must_use]
    pub fn with_sleep(mut self, sleep: Box<dyn Sleep>) -> Self {
        self.ways().for_each(|way| way.wakes(&*sleep));
        self.desk.wakes(sleep.bell());
        self.sleep = Some(sleep);
        self
    }

    /// Takes what comes and tells nobody, for a queue that is about to be dropped. True once nothing
    /// is owed any more.
    pub fn abandon(&mut self, now: Instant) -> bool {
        let ways = self.lanes.iter_mut().filter_map(|lane| lane.way.as_mut());
        // Each of them goes on, whatever the others owe.
        ways.map(|way| way.abandon(now)).filter(|is_done| !is_done).count() == 0
    }

    /// How many paths take requests now.
    pub fn open_paths(&self) -> usize {
        self.views.iter().filter(|view| view.is_usable()).count()
    }

    fn ways(&self) -> impl Iterator<Item = &Way> {
        self.lanes.iter().filter_map(|lane| lane.way.as_ref())
    }

    #[inline]
    fn is_ordinary(&self) -> bool {
        self.takes_new() && !self.has_resting
    }

    /// Whether nothing goes before what is submitted.
    #[inline]
    fn takes_new(&self) -> bool {
        self.heeded == self.shared.word() && self.down_since.is_none() && !self.kept.is_cautious()
    }

    /// Hands requests to the ways, as far as there is room to keep them.
    #[inline]
    fn pass_on(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let mut taken = 0;
        for run in requests.chunks(BATCH) {
            let count = self.share_out(now, run, segments);
            self.send_batches(now, segments);
            taken += count;
            if count < run.len() {
                break;
            }
        }
        taken
    }

    /// Finds a path for each request.
    #[inline]
    fn share_out(&mut self, now: Instant, run: &[Request], segments: &[Segment]) -> usize {
        let mut count = 0;
        for request in run {
            let Some(path) = self.route.choose(&self.views) else { break };
            let Some(mut kept) = self.kept.keep(now, request, segments) else { break };
            let path = match request.operation {
                Operation::Flush => self.begin_flush(kept.token, path),
                _ => path,
            };
            kept.token = self.kept.send_to(kept.token, path);
            self.views[path].in_flight += 1;
            self.lanes[path].batch.push(kept);
            count += 1;
        }
        count
    }

    /// A flush is kept in `slot` and would go to `path`: where it goes instead.
    #[cold]
    fn begin_flush(&mut self, slot: u64, path: usize) -> usize {
        if !self.flushes.begin(slot) {
            return path;
        }
        // One that rests is not waited for by what is new.
        let path = match self.flushes.goes(slot, reach(&self.views)) {
            Goes::To(path) => path,
            Goes::Anywhere | Goes::Later => path,
        };
        let reach = reach(&self.views);
        self.flushes.sent(slot, self.lanes[path].association(), reach);
        path
    }

    /// Submits what goes to each path. What one has no room for waits.
    #[inline]
    fn send_batches(&mut self, now: Instant, segments: &[Segment]) {
        for (path, lane) in self.lanes.iter_mut().enumerate() {
            let (Some(way), false) = (&mut lane.way, lane.batch.is_empty()) else { continue };
            let count = way.submit(now, &lane.batch, segments);
            lane.is_dirty |= count > 0;
            for request in &lane.batch[count..] {
                self.views[path].in_flight -= 1;
                self.kept.hold(request.token);
            }
            lane.batch.clear();
        }
    }

    /// While there is no path, or something else goes first.
    #[cold]
    fn submit_slowly(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        if self.kept.is_empty() {
            self.look(now);
        }
        self.settle(now);
        if self.has_failed(now) {
            let room = (self.limits.depth_max as usize).saturating_sub(self.failed.len());
            let count = requests.len().min(room);
            self.failed.extend(requests[..count].iter().map(|request| failed(request.token)));
            return count;
        }
        if self.takes_new() { self.pass_on(now, requests, segments) } else { 0 }
    }

    /// Looks at all paths. Who is owed nothing need not poll, and what has come would not be noticed:
    /// a connection that was made, or made again.
    fn look(&mut self, now: Instant) {
        // Only paths that were lost have something to answer, and nobody waits for it.
        let mut answers = Answers::with_capacity(BATCH);
        (0..self.lanes.len()).for_each(|path| self.poll_path(now, path, &mut answers));
    }

    /// Whether it is to fail what it has, or gets.
    fn has_failed(&self, now: Instant) -> bool {
        self.down_since.is_some_and(|since| now.since(since) >= self.fail_fast)
    }

    /// Takes news, looks which paths there are, and sends again what waits for one.
    fn settle(&mut self, now: Instant) {
        if self.heeded != self.shared.word() {
            self.heed();
        }
        (0..self.lanes.len()).for_each(|path| self.succeed(path));
        if self.has_resting {
            self.end_rests(now);
        }
        if self.views.iter().any(View::is_usable) {
            self.down_since = None;
        } else {
            self.down_since.get_or_insert(now);
        }
        if self.has_failed(now) {
            while let Some(slot) = self.kept.give_up() {
                self.flushes.forget(slot);
                self.failed.push(failed(self.kept.forget(slot)));
            }
        } else {
            self.send_again(now);
        }
    }

    /// Those that have rested take requests again.
    fn end_rests(&mut self, now: Instant) {
        for (lane, view) in self.lanes.iter().zip(&mut self.views) {
            view.is_resting &= now < lane.rests_until;
        }
        self.has_resting = self.views.iter().any(|view| view.is_resting);
    }

    /// Takes what the tending thread has said.
    fn heed(&mut self) {
        self.heeded = self.shared.word();
        for (path, view) in self.views.iter_mut().enumerate() {
            view.access = self.shared.access(path);
        }
        self.desk.take().into_iter().for_each(|(path, way)| self.welcome(path, way));
    }

    fn welcome(&mut self, path: usize, way: Way) {
        if let Some(sleep) = &self.sleep {
            way.wakes(&**sleep);
        }
        self.lanes[path].next = Some(way);
        self.succeed(path);
    }

    /// A controller that has ended, and owes nothing, gives way to a later one.
    fn succeed(&mut self, path: usize) {
        let (lane, view) = (&mut self.lanes[path], &mut self.views[path]);
        let is_over = lane.way.as_ref().is_none_or(|way| way.standing() == Order::Dead);
        let owes_nothing = view.in_flight == 0 && lane.stale == 0;
        if is_over && owes_nothing && (lane.way.is_some() || lane.next.is_some()) {
            lane.way = lane.next.take();
            lane.condition = Condition::Cut;
            view.is_open = false;
        }
    }

    /// Sends what is to be sent again, as far as there are paths.
    fn send_again(&mut self, now: Instant) {
        while let Some(slot) = self.kept.first_again() {
            let reach = reach(&self.views);
            let path = match self.flushes.goes(slot, reach) {
                Goes::Anywhere => self.route.choose(&self.views),
                Goes::To(path) => Some(path),
                Goes::Later => None,
            };
            let Some(path) = path else { return };
            let (lane, view) = (&mut self.lanes[path], &mut self.views[path]);
            let Some(way) = &mut lane.way else { return };
            let next = self.kept.next_again(view.in_flight as usize);
            let Some((request, segments)) = next else { return };
            self.flushes.sent(slot, way.association(), reach);
            if way.submit(now, &[request], segments) == 0 {
                return;
            }
            view.in_flight += 1;
            lane.is_dirty = true;
            self.kept.sent_again(now, path);
        }
    }

    /// Answers that are not plain successes, or a path that is not what it was.
    #[cold]
    fn sort_out(&mut self, now: Instant, path: usize, first: usize, answers: &mut Answers) {
        self.note_cut(now, path);
        let reach = reach(&self.views);
        let (lane, view) = (&mut self.lanes[path], &mut self.views[path]);
        let Some(way) = &mut lane.way else { return };
        let (kept, shared, stale) = (&mut self.kept, &self.shared, &mut lane.stale);
        let flushes = &mut self.flushes;
        let cut = lane.cut.unwrap_or(Cut { at: now, broken: Broken::No });
        answers.sift(first, |answer| {
            let Answer { token, outcome, .. } = *answer;
            if !kept.is_awaited(token) {
                *stale -= 1;
                return true;
            }
            view.in_flight -= 1;
            let is_ours = match fate::of_answer(outcome) {
                Fate::Told => {
                    kept.acquit(token);
                    match flushes.answered(token, outcome, way.association(), reach) {
                        Worth::Told => false,
                        Worth::NotAll => {
                            kept.hold(token);
                            true
                        }
                        Worth::Lost => {
                            let (token, outcome) = (kept.forget(token), flushes::LOST);
                            self.failed.push(Answer { token, outcome, result: 0 });
                            true
                        }
                    }
                }
                Fate::NotDone(access) => {
                    view.access = access;
                    shared.doubt(path);
                    kept.turn_away(token, true)
                }
                Fate::Interrupted => kept.turn_away(token, false),
                Fate::Unclear => {
                    (view.is_resting, lane.rests_until) = (true, now.after(REST));
                    self.has_resting = true;
                    kept.turn_away(token, false)
                }
                Fate::Ended => {
                    let ending = kept.ending(cut, token, way.limit);
                    kept.send_again(token, ending)
                }
            };
            if !is_ours {
                flushes.forget(token);
            }
            is_ours
        });
        self.leave_if_cut(path, cut);
    }

    /// Notes what was under way when a connection goes: later there is less.
    fn note_cut(&mut self, now: Instant, path: usize) {
        let (lane, view) = (&mut self.lanes[path], &self.views[path]);
        let Some(way) = &lane.way else { return };
        if way.condition() == Condition::Cut && lane.condition != Condition::Cut {
            let broken = match (way.is_broken(), view.in_flight) {
                (false, _) => Broken::No,
                (true, 1) => Broken::UnderOne,
                (true, _) => Broken::UnderMany,
            };
            lane.cut = Some(Cut { at: now, broken });
        }
    }

    /// What may go elsewhere does, if there is no connection any more.
    fn leave_if_cut(&mut self, path: usize, cut: Cut) {
        let (lane, view) = (&mut self.lanes[path], &mut self.views[path]);
        let Some(way) = &mut lane.way else { return };
        if lane.condition != way.condition() {
            lane.condition = way.condition();
        }
        view.is_open = lane.condition == Condition::Open;
        if lane.condition == Condition::Cut && view.in_flight > 0 {
            // What was split and has not been sent whole must not go on when others have its memory.
            way.queue().give_up_unsent();
            let (count, guilty) = self.kept.leave(path, cut, way.limit, fate::only_looks);
            view.in_flight -= count;
            lane.stale += count;
            for slot in guilty {
                self.flushes.forget(slot);
                let (token, outcome) = (self.kept.forget(slot), Outcome::ABORTED_BY_HOST);
                self.failed.push(Answer { token, outcome, result: 0 });
            }
        }
    }

    #[inline]
    fn poll_path(&mut self, now: Instant, path: usize, answers: &mut Answers) {
        let first = answers.len();
        let lane = &mut self.lanes[path];
        let Some(way) = &mut lane.way else { return };
        way.poll(now, answers);
        let new = answers.after_mut(first);
        let is_plain = lane.condition == way.condition()
            && lane.stale == 0
            && lane.next.is_none()
            && new.iter().all(|answer| answer.outcome.is_success())
            && !self.kept.is_cautious()
            && self.flushes.is_empty();
        if is_plain {
            self.views[path].in_flight -= u32::try_from(new.len()).unwrap_or(u32::MAX);
        } else {
            self.sort_out(now, path, first, answers);
        }
        let mut has_changed = false;
        for answer in answers.after_mut(first) {
            has_changed |= self.kept.is_volatile(answer.token);
            answer.token = self.kept.forget(answer.token);
        }
        let Some(way) = &mut self.lanes[path].way else { return };
        if has_changed
            && self.has_cache
            && let Some(by) = way.association()
        {
            self.shared.caches().wrote(by);
        }
        way.send_rest();
        if !is_plain {
            self.succeed(path);
        }
    }
}

impl PathLane {
    fn new() -> Self {
        Self {
            way: None,
            condition: Condition::Cut,
            cut: None,
            rests_until: Instant::default(),
            stale: 0,
            batch: Vec::with_capacity(BATCH),
            is_dirty: false,
            next: None,
        }
    }

    /// The controller that has answered what was polled last.
    fn association(&self) -> Option<&Association> {
        self.way.as_ref()?.association()
    }
}

/// Which paths take requests, now or when they have rested.
fn reach(views: &[View]) -> Reach {
    let mut reach = Reach::default();
    for (path, view) in views.iter().enumerate() {
        let rested = View { is_resting: false, ..*view };
        reach.now |= u32::from(view.is_usable()) << path;
        reach.soon |= u32::from(rested.is_usable()) << path;
    }
    reach
}

const fn failed(token: u64) -> Answer {
    Answer { token, outcome: Outcome::PATH_ERROR, result: 0 }
}

impl Backend for MultipathQueue {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    #[inline]
    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        if self.is_ordinary() {
            let taken = self.pass_on(now, requests, segments);
            if taken > 0 {
                return taken;
            }
        }
        // It is full, or has no path that it knows of.
        self.submit_slowly(now, requests, segments)
    }

    #[inline]
    fn flush(&mut self) {
        for lane in self.lanes.iter_mut().filter(|lane| lane.is_dirty) {
            lane.is_dirty = false;
            if let Some(way) = &mut lane.way {
                way.flush();
            }
        }
    }

    #[inline]
    fn poll(&mut self, now: Instant, answers: &mut Answers) -> usize {
        let first = answers.len();
        (0..self.lanes.len()).for_each(|path| self.poll_path(now, path, answers));
        if !self.is_ordinary() || !self.views.iter().any(View::is_usable) {
            self.settle(now);
            self.flush();
        }
        let count = self.failed.len().min(answers.room());
        self.failed.drain(..count).for_each(|answer| answers.push(answer));
        answers.len() - first
    }

    fn doorbells(&self) -> DoorbellCounts {
        self.ways().map(Way::doorbells).fold(DoorbellCounts::default(), DoorbellCounts::plus)
    }

    fn losses(&self) -> u64 {
        self.flushes.losses()
    }

    fn heed_losses(&mut self, count: u64) {
        self.flushes.heed(count);
    }

    fn wake_at(&self) -> Instant {
        if !self.failed.is_empty() {
            return Instant::default();
        }
        let end = self.down_since.filter(|_| self.kept.has_again());
        let end = end.map_or(Instant::NEVER, |since| since.after(self.fail_fast));
        let rests = self.lanes.iter().zip(&self.views).filter(|(_, view)| view.is_resting);
        let end = rests.map(|(lane, _)| lane.rests_until).fold(end, Instant::min);
        self.ways().map(Way::wake_at).fold(end, Instant::min)
    }

    fn wake_source(&self) -> WakeSource<'_> {
        self.sleep.as_ref().map_or(WakeSource::Nothing, |sleep| sleep.wake_source())
    }

    fn arm(&mut self) -> bool {
        let Some(sleep) = &mut self.sleep else { return true };
        sleep.clear();
        let ways = self.lanes.iter_mut().filter_map(|lane| lane.way.as_mut());
        // Each of them is armed, whatever the others have to do.
        let busy = ways.map(|way| way.arm(&mut **sleep)).filter(|is_busy| *is_busy).count();
        busy > 0 || !self.failed.is_empty() || self.heeded != self.shared.word()
    }

    fn disarm(&mut self) {
        self.lanes.iter_mut().filter_map(|lane| lane.way.as_mut()).for_each(Way::disarm);
    }
}
