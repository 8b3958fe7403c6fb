//! One thread's way to a device on which things go wrong.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use base::{
    Answer, Answers, Backend, DoorbellCounts, Instant, Limits, Medium, Memory, Operation, Outcome,
    Random, Request, Segment, Vector, WakeSource,
};
use dma::Region;
use host::EventVectors;
use host::event::EventVector;

use super::Shared;
use super::rule::{Effect, Strike};
use crate::backend::joined::Joined;
use crate::backend::pieces::Pieces;
use crate::backend::range::check;
use crate::backend::ready::Ready;

/// A channel. Its inner one goes first and waits until nothing touches memory any more; then the
/// memory goes.
pub(super) struct FaultChannel {
    inner: Box<dyn Backend>,
    limits: Limits,
    shared: Arc<Shared>,
    slots: Box<[Slot]>,
    free: Vec<u32>,
    /// Requests that hang.
    hanging: Vec<u32>,
    /// Releases and aborts that were seen.
    seen: (u64, u64),
    batch: Vec<Request>,
    /// The memory of a request that is cut, or has a block of ours in it.
    segments: Vec<Segment>,
    below: Answers,
    ready: Ready,
    /// A block for each write under way whose data is corrupted.
    blocks: Region,
    free_blocks: Vec<u16>,
    wake: Joined,
    /// Tells this thread, if it sleeps, that what hung was let go.
    vector: EventVector,
    number: u64,
}

/// A request under way.
#[derive(Clone, Copy, Debug)]
struct Slot {
    token: u64,
    then: Then,
}

/// What is to be done when the answer comes from below.
#[derive(Clone, Copy, Debug)]
enum Then {
    /// Hand it on.
    Pass,
    /// Say this instead.
    Say(Outcome),
    /// Flip these bits first, if it was a success.
    Flip(Flips),
    /// Take a block of ours back.
    Take(u16),
    /// Keep it; it came if it is there.
    Keep(Option<Answer>),
}

/// Single bits of memory.
#[derive(Clone, Copy, Debug, Default)]
struct Flips([Option<(Segment, u8)>; FLIPS_MAX]);

const FLIPS_MAX: usize = 3;
/// Writes under way whose data is corrupted.
const BLOCKS: u16 = 8;
/// Requests that go down at once.
const BATCH: usize = 256;

impl FaultChannel {
    pub(super) fn open(
        medium: &dyn Medium,
        shared: Arc<Shared>,
        limits: Limits,
    ) -> Result<Self, String> {
        let inner = medium.channel()?;
        let refuse = |error: &dyn std::fmt::Display| format!("fault: {error}");
        let vectors = EventVectors::new(1).map_err(|error| refuse(&error))?;
        let vector = vectors.vector(0).ok_or("fault: no event descriptor, expected one")?;
        let wake = Joined::of([WakeSource::Descriptor(vector.descriptor()), inner.wake_source()])?;
        let blocks = shared.regions.allocate(usize::from(BLOCKS) * limits.block_size as usize);
        let blocks = blocks.map_err(|error| refuse(&error))?;
        let depth = limits.depth_max as usize;
        Ok(Self {
            inner,
            slots: vec![Slot { token: 0, then: Then::Pass }; depth].into(),
            free: (0..limits.depth_max).rev().collect(),
            hanging: Vec::with_capacity(depth),
            seen: (shared.releases.load(Ordering::Acquire), shared.aborts.load(Ordering::Acquire)),
            batch: Vec::with_capacity(BATCH),
            segments: Vec::with_capacity(medium.limits().segments_max.into()),
            below: Answers::with_capacity(depth),
            ready: Ready::with_depth(limits.depth_max),
            blocks,
            free_blocks: (0..BLOCKS).collect(),
            wake,
            vector,
            number: shared.enlist(vectors),
            limits,
            shared,
        })
    }

    /// How many more requests may be taken. An answer that waits to be polled has given its slot
    /// back, and still counts.
    fn room(&self) -> usize {
        self.free.len().saturating_sub(self.ready.len())
    }

    /// Sends requests down as they are.
    fn pass_on(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let mut done = 0;
        while done < requests.len() {
            let rest = requests[done..].iter().zip(self.free.iter().rev()).take(BATCH);
            self.batch.clear();
            self.batch
                .extend(rest.map(|(request, slot)| Request { token: (*slot).into(), ..*request }));
            let taken = self.inner.submit(now, &self.batch, segments);
            for request in &requests[done..done + taken] {
                let Some(slot) = self.free.pop() else { break };
                self.slots[slot as usize] = Slot { token: request.token, then: Then::Pass };
            }
            done += taken;
            if taken < self.batch.len() {
                break;
            }
        }
        done
    }

    /// Takes one request that a rule has struck; false if there is no room for it now.
    fn suffer(
        &mut self,
        now: Instant,
        request: &Request,
        segments: &[Segment],
        strike: &Strike,
    ) -> bool {
        let mut random = strike.random.clone();
        let own = match check(&self.limits, request, segments) {
            // Nobody carries this out anyway; whoever is below says why.
            Err(_) => return self.pass_on(now, std::slice::from_ref(request), segments) == 1,
            Ok(own) => own,
        };
        match strike.effect {
            Effect::Error(outcome) => {
                let outcome = outcome.unwrap_or(broken(request.operation));
                self.ready.push(Answer { token: request.token, outcome, result: 0 });
                true
            }
            Effect::Drop => self.free.pop().is_some(),
            Effect::Hang => {
                let slot = self.free.last().copied();
                let taken = self.send(now, request, segments, Then::Keep(None));
                if taken {
                    self.hanging.extend(slot);
                    self.shared.hanging.fetch_add(1, Ordering::Release);
                }
                taken
            }
            Effect::Corrupt if request.operation == Operation::Read => {
                let flips = Flips::draw(&mut random, own);
                self.send(now, request, segments, Then::Flip(flips))
            }
            Effect::Corrupt => self.write_corrupted(now, request, own, &mut random),
            Effect::Tear => {
                self.send_part(now, request, own, &mut random, Some(Outcome::WRITE_FAULT))
            }
            Effect::Short => self.send_part(now, request, own, &mut random, None),
        }
    }

    /// Sends one request down; false if it was not taken.
    fn send(&mut self, now: Instant, request: &Request, segments: &[Segment], then: Then) -> bool {
        let Some(slot) = self.free.last().copied() else { return false };
        let child = Request { token: slot.into(), ..*request };
        if self.inner.submit(now, &[child], segments) == 0 {
            return false;
        }
        self.free.pop();
        self.slots[slot as usize] = Slot { token: request.token, then };
        true
    }

    /// Sends the first blocks of a request down, fewer than all, and has it say `instead`.
    fn send_part(
        &mut self,
        now: Instant,
        request: &Request,
        own: &[Segment],
        random: &mut Random,
        instead: Option<Outcome>,
    ) -> bool {
        let blocks = u32::try_from(random.below(request.blocks.into())).unwrap_or(0);
        if blocks == 0 {
            let outcome = instead.unwrap_or(Outcome::SUCCESS);
            self.ready.push(Answer { token: request.token, outcome, result: 0 });
            return true;
        }
        let mut segments = std::mem::take(&mut self.segments);
        segments.clear();
        let len_bytes = u64::from(blocks) * u64::from(self.limits.block_size);
        Pieces::of(own).take_into(len_bytes, &mut segments);
        let segment_count = u16::try_from(segments.len()).unwrap_or(u16::MAX);
        let part = Request { blocks, segment_first: 0, segment_count, ..*request };
        let taken = self.send(now, &part, &segments, instead.map_or(Then::Pass, Then::Say));
        self.segments = segments;
        taken
    }

    /// Sends a write down with one of its blocks replaced by a copy in which bits are wrong.
    fn write_corrupted(
        &mut self,
        now: Instant,
        request: &Request,
        own: &[Segment],
        random: &mut Random,
    ) -> bool {
        if request.blocks == 0 {
            return self.send(now, request, &[], Then::Pass);
        }
        let Some(number) = self.free_blocks.last().copied() else { return false };
        let size = self.limits.block_size;
        let offset = u64::from(number) * u64::from(size);
        let ours = Segment { region: self.blocks.id(), offset, len_bytes: size };
        let before = random.below(request.blocks.into()) * u64::from(size);
        let mut segments = std::mem::take(&mut self.segments);
        segments.clear();
        let mut pieces = Pieces::of(own);
        pieces.take_into(before, &mut segments);
        let regions = &self.shared.regions;
        let copied = pieces.take_each(size.into(), |piece, done| {
            let target = Segment { offset: offset + done, len_bytes: piece.len_bytes, ..ours };
            regions.copy(piece, target)
        });
        if copied.is_ok() {
            segments.push(ours);
        } else {
            // Memory that does not exist is for whoever is below to find.
            segments.clear();
            pieces = Pieces::of(own);
        }
        pieces.take_into(u64::MAX, &mut segments);
        Flips::draw(random, &[ours]).apply(&self.shared);
        let segment_count = u16::try_from(segments.len()).unwrap_or(u16::MAX);
        let child = Request { segment_first: 0, segment_count, ..*request };
        let taken = self.send(now, &child, &segments, Then::Take(number));
        self.segments = segments;
        if taken {
            self.free_blocks.pop();
        }
        taken
    }

    /// Deals with an answer from below.
    fn come_up(&mut self, answer: Answer) {
        let Ok(number) = u32::try_from(answer.token) else { return };
        let Slot { token, then } = &mut self.slots[number as usize];
        let mut answer = Answer { token: *token, ..answer };
        match then {
            Then::Pass => {}
            Then::Say(outcome) => answer.outcome = *outcome,
            Then::Flip(flips) if answer.outcome.is_success() => flips.apply(&self.shared),
            Then::Flip(_) => {}
            Then::Take(block) => self.free_blocks.push(*block),
            Then::Keep(kept) => {
                *kept = Some(answer);
                return;
            }
        }
        self.free.push(number);
        self.ready.push(answer);
    }

    /// Lets go what hangs, if that was ordered since the last look.
    fn look_for_release(&mut self) {
        let releases = self.shared.releases.load(Ordering::Acquire);
        if releases == self.seen.0 {
            return;
        }
        let aborts = self.shared.aborts.load(Ordering::Acquire);
        let aborted = aborts != self.seen.1;
        self.seen = (releases, aborts);
        self.shared.hanging.fetch_sub(self.hanging.len() as u64, Ordering::Release);
        for number in self.hanging.drain(..) {
            let slot = &mut self.slots[number as usize];
            let Then::Keep(kept) = slot.then else { continue };
            match kept {
                // It still is below, and may touch memory.
                None if aborted => slot.then = Then::Say(Outcome::ABORTED),
                None => slot.then = Then::Pass,
                Some(answer) => {
                    let outcome = if aborted { Outcome::ABORTED } else { answer.outcome };
                    self.ready.push(Answer { outcome, ..answer });
                    self.free.push(number);
                }
            }
        }
    }

    /// Whether a release was ordered that has not been looked for.
    fn was_released(&self) -> bool {
        self.shared.releases.load(Ordering::Acquire) != self.seen.0
    }
}

impl Backend for FaultChannel {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let requests = &requests[..requests.len().min(self.room())];
        if !self.shared.is_armed.load(Ordering::Acquire) {
            return self.pass_on(now, requests, segments);
        }
        let shared = Arc::clone(&self.shared);
        let mut rules = shared.rules();
        let take = |request: &&Request| {
            let strike = rules.strike(request);
            let taken = match &strike {
                None => self.pass_on(now, std::slice::from_ref(*request), segments) == 1,
                Some(strike) => self.suffer(now, request, segments, strike),
            };
            if taken {
                rules.taken(request, strike.as_ref());
            }
            taken
        };
        requests.iter().take_while(take).count()
    }

    fn flush(&mut self) {
        self.inner.flush();
    }

    fn poll(&mut self, now: Instant, answers: &mut Answers) -> usize {
        let mut below = std::mem::replace(&mut self.below, Answers::with_capacity(0));
        self.inner.poll(now, &mut below);
        below.drain().for_each(|answer| self.come_up(answer));
        self.below = below;
        self.look_for_release();
        self.ready.give(answers)
    }

    fn doorbells(&self) -> DoorbellCounts {
        self.inner.doorbells()
    }

    fn wake_at(&self) -> Instant {
        let has_work = self.ready.len() > 0 || self.was_released();
        if has_work { Instant::default() } else { self.inner.wake_at() }
    }

    fn wake_source(&self) -> WakeSource<'_> {
        self.wake.source()
    }

    fn arm(&mut self) -> bool {
        let ordered = self.vector.unmask();
        let busy_below = self.inner.arm();
        !ordered || busy_below || self.ready.len() > 0 || self.was_released()
    }

    fn disarm(&mut self) {
        self.vector.mask();
        self.inner.disarm();
    }

    fn acknowledge_losses(&mut self) -> Result<(), String> {
        self.inner.acknowledge_losses()
    }
}

impl Drop for FaultChannel {
    fn drop(&mut self) {
        self.shared.hanging.fetch_sub(self.hanging.len() as u64, Ordering::Release);
        self.shared.discharge(self.number);
    }
}

impl Flips {
    /// One to three bits of the bytes in `segments`, no two of them in the same byte.
    fn draw(random: &mut Random, segments: &[Segment]) -> Self {
        let len_bytes: u64 = segments.iter().map(|segment| u64::from(segment.len_bytes)).sum();
        let count = (random.below(FLIPS_MAX as u64) + 1).min(len_bytes);
        let mut flips = Self::default();
        for (number, flip) in (0..count).zip(&mut flips.0) {
            // Each in a stretch of its own.
            let (from, to) = (len_bytes * number / count, len_bytes * (number + 1) / count);
            let mut skip = from + random.below(to - from);
            let byte = segments.iter().find_map(|segment| {
                let here = u32::try_from(skip).ok().and_then(|skip| segment.slice(skip, 1));
                skip = skip.saturating_sub(segment.len_bytes.into());
                here
            });
            *flip = byte.map(|byte| (byte, 1 << random.below(8)));
        }
        flips
    }

    /// Flips the bits. Memory that does not exist has none.
    fn apply(&self, shared: &Shared) {
        for (byte, mask) in self.0.iter().flatten() {
            let mut value = [0];
            if shared.regions.load(*byte, &mut value).is_ok() {
                value[0] ^= mask;
                let stored = shared.regions.store(*byte, &value);
                debug_assert!(stored.is_ok(), "it was loaded just now");
            }
        }
    }
}

/// What a medium says that can no longer do such a thing.
fn broken(operation: Operation) -> Outcome {
    match operation {
        Operation::Read | Operation::Compare | Operation::Verify => Outcome::UNRECOVERED_READ,
        _ => Outcome::WRITE_FAULT,
    }
}
