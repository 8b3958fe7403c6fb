//! One thread's way to a file: a table of requests under way over an engine.

use base::{
    Answer, Answers, Backend, Flags, Instant, Limits, Memory, Operation, Outcome, Request, Segment,
    WakeSource,
};
use dma::Regions;
use host::Errno;
use host::engine::{Ended, Job, Refused};

use super::jobs::Jobs;
use super::lost_write::{cached, is_loss};
use super::work::{Awaits, Work, is_unsupported};
use super::{BUFFERS, DEPTH_MAX, Loan, SEGMENTS_MAX, Shared};
use crate::backend::pieces::Pieces;
use crate::backend::range::check;
use crate::backend::ready::Ready;

/// A channel. When it is dropped the engine goes first and waits until the kernel is done with all
/// memory; then the memory goes.
#[derive(Debug)]
pub(super) struct FileChannel<J> {
    engine: J,
    loan: Loan,
    /// Those of the medium, with the size that it had when requests were last taken.
    limits: Limits,
    works: Box<[Work]>,
    free: Vec<u16>,
    buffers: Vec<u16>,
    ended: Vec<Ended>,
    syncs: Syncs,
    /// How many losses of the file its owner has acknowledged.
    acknowledged: u64,
    ready: Ready,
}

/// Works that wait for a sync. One at a time is with the engine: of two that overlap, the kernel may
/// report a lost write to one and success to the other, whichever ends first. Whoever comes meanwhile
/// shares the next one.
#[derive(Debug)]
struct Syncs {
    /// Those whose sync is under way.
    running: Vec<u16>,
    waiting: Vec<u16>,
    /// Those of the sync that has just ended.
    ended: Vec<u16>,
    /// How many of the next ones to end were asked for before a loss was acknowledged: they fail.
    stale: u8,
}

/// The token of a sync.
pub(super) const SYNC: u64 = u64::MAX;

/// What comes next for a work.
enum Next {
    /// The job of its state.
    Job,
    /// The end.
    Answer(Outcome),
}

/// The answer to a request that needs no job, or what its work begins with.
enum Begin {
    Answer(Outcome),
    Work { awaits: Awaits, buffer: bool },
}

impl<J: Jobs> FileChannel<J> {
    pub(super) fn new(engine: J, loan: Loan) -> Self {
        Self {
            engine,
            limits: loan.shared.limits(),
            acknowledged: loan.shared.lost_writes.acknowledged(),
            loan,
            works: (0..DEPTH_MAX).map(|_| Work::idle(SEGMENTS_MAX)).collect(),
            free: (0..DEPTH_MAX).rev().collect(),
            buffers: (0..BUFFERS).rev().collect(),
            ended: Vec::with_capacity(usize::from(DEPTH_MAX)),
            syncs: Syncs::new(),
            ready: Ready::with_depth(u32::from(DEPTH_MAX)),
        }
    }

    /// Takes one request; `false` if there is no room for it now.
    fn take(&mut self, request: &Request, segments: &[Segment]) -> bool {
        // An answer that waits to be polled has given its place back, and still counts.
        if self.free.len() <= self.ready.len() {
            return false;
        }
        let begin = check(&self.limits, request, segments)
            .map(|own| (begin(&self.loan.shared, request, own), own));
        let (awaits, buffer, own) = match begin {
            Err(outcome) | Ok((Begin::Answer(outcome), _)) => {
                self.ready.push(Answer { token: request.token, outcome, result: 0 });
                return true;
            }
            Ok((Begin::Work { awaits, buffer }, own)) => (awaits, buffer, own),
        };
        if buffer && self.buffers.is_empty() {
            return false;
        }
        let Some(index) = self.free.pop() else { return false };
        let work = &mut self.works[usize::from(index)];
        work.request = *request;
        work.segments.clear();
        work.segments.extend_from_slice(own);
        (work.awaits, work.done, work.own) = (awaits, 0, Segment::default());
        work.buffer = if buffer { self.buffers.pop() } else { None };
        let next = self.enter(index, awaits);
        self.go_on(index, next);
        true
    }

    /// Puts a work into a state and prepares the memory of its job.
    fn enter(&mut self, index: u16, awaits: Awaits) -> Next {
        let Shared { regions, limits, zeroes, .. } = &*self.loan.shared;
        let work = &mut self.works[usize::from(index)];
        work.awaits = awaits;
        let chunk_begins = match work.request.operation {
            Operation::Copy => awaits == Awaits::Fetched,
            _ => matches!(awaits, Awaits::Fetched | Awaits::Stored),
        };
        if chunk_begins {
            let whole = work.buffer.map_or(zeroes.segment(), |buffer| self.loan.buffer(buffer));
            work.next_chunk(whole, limits.block_size);
        }
        if awaits == Awaits::Stored && work.request.operation == Operation::Write {
            return match gather(regions, &work.segments, work.own) {
                Ok(()) => Next::Job,
                Err(outcome) => Next::Answer(outcome),
            };
        }
        Next::Job
    }

    /// Does what comes next, and puts the work away if that is its answer.
    fn go_on(&mut self, index: u16, next: Next) {
        let outcome = match next {
            Next::Answer(outcome) => outcome,
            Next::Job => match self.ask(index) {
                Ok(()) => return,
                Err(Refused::NoSuchMemory(_)) => Outcome::DATA_TRANSFER_ERROR,
                Err(Refused::Full | Refused::TooManySegments) => Outcome::INTERNAL_ERROR,
            },
        };
        let work = &mut self.works[usize::from(index)];
        let Request { token, lba, blocks, operation, .. } = work.request;
        let writes =
            matches!(operation, Operation::Write | Operation::WriteZeroes | Operation::Copy);
        if writes && outcome.is_success() {
            self.loan.shared.uncorrectable.clear(lba, u64::from(blocks));
        }
        self.buffers.extend(work.buffer.take());
        self.free.push(index);
        self.ready.push(Answer { token, outcome, result: 0 });
    }

    fn ask(&mut self, index: u16) -> Result<(), Refused> {
        if matches!(self.works[usize::from(index)].awaits, Awaits::Synced | Awaits::Settled) {
            self.syncs.waiting.push(index);
            self.sync();
            return Ok(());
        }
        let block_size = u64::from(self.loan.shared.limits.block_size);
        let job = self.works[usize::from(index)].job(block_size);
        self.engine.submit(u64::from(index), job)
    }

    /// Begins a sync for all that wait for one, unless one is under way.
    fn sync(&mut self) {
        let Syncs { running, waiting, .. } = &mut self.syncs;
        if running.is_empty() && !waiting.is_empty() {
            std::mem::swap(running, waiting);
            let asked = self.engine.submit(SYNC, Job::Sync);
            asked.expect(
                "the engine has room for a job of each work, and those that wait have none",
            );
        }
    }

    /// The sync under way has ended: the same came of it for all who waited.
    #[cold]
    fn after_sync(&mut self, result: Result<(), Errno>) {
        // Before what was acknowledged since: it fails for that, whatever the kernel says.
        let acknowledged = self.acknowledged;
        if self.syncs.stale > 0 {
            (self.syncs.stale, self.acknowledged) = (self.syncs.stale - 1, 0);
        }
        let mut ended = std::mem::take(&mut self.syncs.ended);
        std::mem::swap(&mut ended, &mut self.syncs.running);
        for index in &ended {
            let next = self.after(*index, result);
            self.go_on(*index, next);
        }
        ended.clear();
        self.syncs.ended = ended;
        self.acknowledged = acknowledged;
        self.sync();
    }

    /// What comes after the current job of a work has ended.
    fn after(&mut self, index: u16, result: Result<(), Errno>) -> Next {
        let Self { works, loan, acknowledged, .. } = self;
        let work = &mut works[usize::from(index)];
        match (result, work.awaits) {
            (Err(errno), Awaits::Holed | Awaits::Zeroed) if is_unsupported(errno) => {
                self.after_unsupported(index)
            }
            (Err(errno), _) => self.after_failure(index, errno),
            (Ok(()), Awaits::Synced) if loan.shared.lost_writes.count() > *acknowledged => {
                Next::Answer(Outcome::WRITE_FAULT)
            }
            (Ok(()), Awaits::Synced) => {
                let awaits = if work.buffer.is_some() { Awaits::Fetched } else { Awaits::Moved };
                self.enter(index, awaits)
            }
            (Ok(()), Awaits::Moved) if !work.request.flags.has(Flags::FUA) => {
                Next::Answer(Outcome::SUCCESS)
            }
            (Ok(()), Awaits::Moved | Awaits::Settled) => self.promise(),
            (Ok(()), Awaits::Fetched) => self.after_fetched(index),
            (Ok(()), Awaits::Stored) => self.after_stored(index),
            (Ok(()), Awaits::Holed | Awaits::Zeroed) => self.settle(index),
        }
    }

    /// The answer to what is to be on stable storage, as far as the kernel knows.
    fn promise(&self) -> Next {
        if self.has_lost_writes() {
            return Next::Answer(Outcome::WRITE_FAULT);
        }
        self.loan.shared.lost_writes.flushed();
        Next::Answer(Outcome::SUCCESS)
    }

    /// Whether writes were lost that the owner of this channel has not acknowledged.
    #[inline]
    fn has_lost_writes(&self) -> bool {
        self.loan.shared.lost_writes.count() > self.acknowledged
    }

    fn acknowledge(&mut self, count: u64) {
        self.acknowledged = self.acknowledged.max(count);
        self.loan.shared.lost_writes.acknowledge(count);
    }

    #[cold]
    fn after_failure(&mut self, index: u16, errno: Errno) -> Next {
        let Shared { lost_writes, file, direct, .. } = &*self.loan.shared;
        let work = &self.works[usize::from(index)];
        if work.request.operation == Operation::Read && file.is_yet_to_grow() {
            return Next::Answer(self.read_short(index));
        }
        let syncs = matches!(work.awaits, Awaits::Synced | Awaits::Settled);
        let Request { operation, flags, .. } = work.request;
        let is_forced = operation == Operation::Write && flags.has(Flags::FUA);
        if syncs || (is_forced && is_loss(errno, direct.is_ok())) {
            lost_writes.note(file.path(), errno);
        }
        Next::Answer(if syncs { Outcome::WRITE_FAULT } else { work.outcome(errno) })
    }

    /// A read of a file that is shorter than it will be.
    #[cold]
    fn read_short(&self, index: u16) -> Outcome {
        let Shared { regions, limits, file, .. } = &*self.loan.shared;
        let Work { request, segments, .. } = &self.works[usize::from(index)];
        let len_bytes = u64::from(request.blocks) * u64::from(limits.block_size);
        let mut bytes = vec![0; usize::try_from(len_bytes).unwrap_or(0)];
        if file.read_short(request.lba * u64::from(limits.block_size), &mut bytes).is_err() {
            return Outcome::UNRECOVERED_READ;
        }
        let mut rest = &bytes[..];
        for segment in segments {
            let (own, more) = rest.split_at(rest.len().min(segment.len_bytes as usize));
            rest = more;
            if regions.store(*segment, own).is_err() {
                return Outcome::DATA_TRANSFER_ERROR;
            }
        }
        Outcome::SUCCESS
    }

    /// The file cannot be told to drop or to zero a range: the other of the two reads the same, and
    /// zeroes can always be written. A deallocation may as well do nothing.
    fn after_unsupported(&mut self, index: u16) -> Next {
        let Work { request, awaits, .. } = &self.works[usize::from(index)];
        let (first, second) = zeroing(request.flags);
        match request.operation {
            Operation::WriteZeroes if *awaits == first => self.enter(index, second),
            Operation::WriteZeroes => self.enter(index, Awaits::Stored),
            _ => Next::Answer(Outcome::SUCCESS),
        }
    }

    fn after_fetched(&mut self, index: u16) -> Next {
        let Shared { regions, limits, .. } = &*self.loan.shared;
        let work = &mut self.works[usize::from(index)];
        match work.request.operation {
            Operation::Copy => self.enter(index, Awaits::Stored),
            Operation::Verify => {
                if work.finish_chunk(limits.block_size) {
                    self.enter(index, Awaits::Fetched)
                } else {
                    Next::Answer(Outcome::SUCCESS)
                }
            }
            Operation::Compare => Next::Answer(compare(regions, work.own, &work.segments)),
            Operation::Read => Next::Answer(scatter(regions, work.own, &work.segments)),
            _ => Next::Answer(Outcome::SUCCESS),
        }
    }

    fn after_stored(&mut self, index: u16) -> Next {
        let block_size = self.loan.shared.limits.block_size;
        let work = &mut self.works[usize::from(index)];
        let more = work.finish_chunk(block_size);
        match work.request.operation {
            Operation::Write if work.request.flags.has(Flags::FUA) => self.promise(),
            Operation::Write => Next::Answer(Outcome::SUCCESS),
            Operation::Copy if more => self.enter(index, Awaits::Fetched),
            _ if more => self.enter(index, Awaits::Stored),
            _ => self.settle(index),
        }
    }

    /// The blocks are as they should be; stable, too, if that was asked for.
    fn settle(&mut self, index: u16) -> Next {
        if self.works[usize::from(index)].request.flags.has(Flags::FUA) {
            self.enter(index, Awaits::Settled)
        } else {
            Next::Answer(Outcome::SUCCESS)
        }
    }
}

impl<J: Jobs> Backend for FileChannel<J> {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, _now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        self.limits.block_count = self.loan.shared.block_count();
        requests.iter().take_while(|request| self.take(request, segments)).count()
    }

    fn flush(&mut self) {
        self.engine.flush();
    }

    fn poll(&mut self, _now: Instant, answers: &mut Answers) -> usize {
        self.engine.poll(&mut self.ended);
        for position in 0..self.ended.len() {
            let Ended { token, result } = self.ended[position];
            if token == SYNC {
                self.after_sync(result);
                continue;
            }
            let Ok(index) = u16::try_from(token) else { continue };
            let next = self.after(index, result);
            self.go_on(index, next);
        }
        self.ended.clear();
        self.engine.flush();
        self.ready.give(answers)
    }

    fn wake_at(&self) -> Instant {
        let has_work = self.ready.len() > 0 || self.engine.has_unstarted();
        if has_work { Instant::default() } else { Instant::NEVER }
    }

    fn wake_source(&self) -> WakeSource<'_> {
        self.engine.wake_source()
    }

    fn is_done_by_kernel(&self) -> bool {
        true
    }

    fn arm(&mut self) -> bool {
        self.ready.len() > 0 || self.engine.arm()
    }

    fn disarm(&mut self) {
        self.engine.disarm();
    }

    fn losses(&self) -> u64 {
        self.loan.shared.lost_writes.count()
    }

    /// Whoever has made good what was lost has written it again, and so does not depend on what reads
    /// return.
    fn heed_losses(&mut self, count: u64) {
        self.acknowledge(count.min(self.losses()));
    }

    /// Only where reads come from the disk: of pages that it could not write, the kernel keeps the new
    /// contents in its cache, marked clean, and forgets them at any time after the next successful flush.
    fn acknowledge_losses(&mut self) -> Result<(), String> {
        let Shared { direct, file, .. } = &*self.loan.shared;
        if let Err(why) = direct {
            return Err(cached(&file.path().display(), *why));
        }
        self.acknowledge(self.losses());
        let Syncs { running, waiting, stale, .. } = &mut self.syncs;
        *stale = u8::from(!running.is_empty()) + u8::from(!waiting.is_empty());
        Ok(())
    }
}

impl Syncs {
    fn new() -> Self {
        let room = || Vec::with_capacity(usize::from(DEPTH_MAX));
        Self { running: room(), waiting: room(), ended: room(), stale: 0 }
    }
}

/// What a request that has passed the checks begins with.
fn begin(shared: &Shared, request: &Request, segments: &[Segment]) -> Begin {
    let Request { lba, operand, operation, flags, .. } = *request;
    let blocks = u64::from(request.blocks);
    let lost = |first| shared.uncorrectable.any(first, blocks);
    let work = |awaits, buffer| Begin::Work { awaits, buffer };
    match operation {
        Operation::Flush => work(Awaits::Settled, false),
        _ if blocks == 0 => Begin::Answer(Outcome::SUCCESS),
        Operation::Read | Operation::Compare | Operation::Verify if lost(lba) => {
            Begin::Answer(Outcome::UNRECOVERED_READ)
        }
        Operation::Copy if lost(operand) => Begin::Answer(Outcome::UNRECOVERED_READ),
        Operation::Read => {
            let direct = goes_directly(shared, segments);
            let moves = if direct { Awaits::Moved } else { Awaits::Fetched };
            work(if flags.has(Flags::FUA) { Awaits::Synced } else { moves }, !direct)
        }
        Operation::Write if goes_directly(shared, segments) => work(Awaits::Moved, false),
        Operation::Write => work(Awaits::Stored, true),
        Operation::Compare | Operation::Verify | Operation::Copy => work(Awaits::Fetched, true),
        Operation::WriteZeroes => work(zeroing(flags).0, false),
        Operation::Deallocate => work(Awaits::Holed, false),
        Operation::WriteUncorrectable => {
            shared.uncorrectable.add(lba, blocks);
            Begin::Answer(Outcome::SUCCESS)
        }
        Operation::CompareAndWrite => Begin::Answer(Outcome::INVALID_OPCODE),
    }
}

/// The two ways of zeroing a range, the one that was asked for first.
fn zeroing(flags: Flags) -> (Awaits, Awaits) {
    if flags.has(Flags::DEALLOCATE) {
        (Awaits::Holed, Awaits::Zeroed)
    } else {
        (Awaits::Zeroed, Awaits::Holed)
    }
}

/// Whether the memory of a request is as the file wants it. Memory that does not exist is found by
/// the engine, which answers for it. What was lent is aligned as whoever lent it was told.
pub(super) fn goes_directly(shared: &Shared, segments: &[Segment]) -> bool {
    let Ok(alignment) = shared.direct else { return true };
    let (memory, unit) = (alignment.memory_bytes as usize, alignment.offset_bytes);
    segments.iter().all(|segment| {
        let address = shared.regions.address(*segment);
        let is_aligned = match address {
            Ok(address) => address.addr().get().is_multiple_of(memory),
            Err(_) => shared.regions.lent(*segment).is_some(),
        };
        segment.len_bytes.is_multiple_of(unit) && is_aligned
    })
}

/// Copies the memory of a request into a buffer of our own.
fn gather(regions: &Regions, segments: &[Segment], own: Segment) -> Result<(), Outcome> {
    each_piece(own, segments, |mine, theirs| {
        regions.copy(theirs, mine).map_err(|_| Outcome::DATA_TRANSFER_ERROR)
    })
}

/// Copies a buffer of our own to the memory of a request.
fn scatter(regions: &Regions, own: Segment, segments: &[Segment]) -> Outcome {
    let copied = each_piece(own, segments, |mine, theirs| {
        regions.copy(mine, theirs).map_err(|_| Outcome::DATA_TRANSFER_ERROR)
    });
    copied.err().unwrap_or(Outcome::SUCCESS)
}

/// Whether a buffer of our own and the memory of a request hold the same bytes.
fn compare(regions: &Regions, own: Segment, segments: &[Segment]) -> Outcome {
    let compared = each_piece(own, segments, |mine, theirs| match regions.equal(mine, theirs) {
        Ok(true) => Ok(()),
        Ok(false) => Err(Outcome::COMPARE_FAILURE),
        Err(_) => Err(Outcome::DATA_TRANSFER_ERROR),
    });
    compared.err().unwrap_or(Outcome::SUCCESS)
}

fn each_piece(
    own: Segment,
    segments: &[Segment],
    mut each: impl FnMut(Segment, Segment) -> Result<(), Outcome>,
) -> Result<(), Outcome> {
    Pieces::of(segments).take_each(u64::from(own.len_bytes), |theirs, done| {
        let mine = u32::try_from(done).ok().and_then(|skip| own.slice(skip, theirs.len_bytes));
        each(mine.ok_or(Outcome::INTERNAL_ERROR)?, theirs)
    })
}
