//! I/O channel of a file: a table of requests in flight over an engine.

use tenmil_base::{
    ChannelWakeup, CompletionBatch, Error, Instant, IoChannel, IoCompletion, IoStatus, Limits,
    Memory, Operation, Request, RequestFlags, Segment, WakeSource,
};
use tenmil_dma::RegionTable;
use tenmil_linux::Errno;
use tenmil_linux::file_engine::{FileOp, JobCompletion, SubmitError};

use super::file_io::FileIo;
use super::file_request::{AwaitedJob, FileRequest, is_unsupported_errno};
use super::lost_write::{may_report_lost_writes, unreadable_loss_hint};
use super::{BUFFERS, ChannelBuffers, DEPTH_MAX, FileShared, SEGMENTS_MAX};
use crate::request_validation::valid_request_segments;
use tenmil_block::CompletionQueue;
use tenmil_block::SegmentCursor;

/// I/O channel of a file device. Drop order: the engine first, which waits until the kernel no longer
/// references any memory; then the memory.
#[derive(Debug)]
pub(super) struct FileChannel<J> {
    engine: J,
    loan: ChannelBuffers,
    /// Limits of the device, with the size as of the last submission.
    limits: Limits,
    requests: Box<[FileRequest]>,
    free: Vec<u16>,
    buffers: Vec<u16>,
    ended: Vec<JobCompletion>,
    syncs: RequestsAwaitingSync,
    /// How many losses of the file its owner has acknowledged.
    acknowledged: u64,
    ready: CompletionQueue,
}

/// Requests that wait for a sync. The engine has at most one sync at a time: of two concurrent ones, the
/// kernel may report a lost write to one and success to the other, regardless of which ends first.
/// Requests that arrive during a sync share the next one.
#[derive(Debug)]
struct RequestsAwaitingSync {
    /// Requests of the sync in flight.
    running: Vec<u16>,
    waiting: Vec<u16>,
    /// Requests of the sync that has just ended.
    ended: Vec<u16>,
    /// How many of the next completions were submitted before a loss was acknowledged: they fail.
    stale: u8,
}

/// The token of a sync.
pub(super) const SYNC: u64 = u64::MAX;

/// The next step of a request.
enum NextRequestStep {
    /// Submit the job of its state.
    Job,
    /// Complete it.
    Complete(IoStatus),
}

/// The status of a request that needs no job, or its first job.
enum FirstStep {
    Complete(IoStatus),
    Run { awaits: AwaitedJob, buffer: bool },
}

impl<J: FileIo> FileChannel<J> {
    pub(super) fn new(engine: J, loan: ChannelBuffers) -> Self {
        Self {
            engine,
            limits: loan.shared.limits(),
            acknowledged: loan.shared.lost_writes.acknowledged_loss_count(),
            loan,
            requests: (0..DEPTH_MAX).map(|_| FileRequest::free_entry(SEGMENTS_MAX)).collect(),
            free: (0..DEPTH_MAX).rev().collect(),
            buffers: (0..BUFFERS).rev().collect(),
            ended: Vec::with_capacity(usize::from(DEPTH_MAX)),
            syncs: RequestsAwaitingSync::new(),
            ready: CompletionQueue::with_depth(u32::from(DEPTH_MAX)),
        }
    }

    /// Accepts one request; returns `false` if there is no free entry or buffer.
    fn accept_request(&mut self, request: &Request, segments: &[Segment]) -> bool {
        // A completion that waits to be polled has freed its entry, and still counts.
        if self.free.len() <= self.ready.len() {
            return false;
        }
        let begin = valid_request_segments(&self.limits, request, segments)
            .map(|own| (first_step(&self.loan.shared, request, own), own));
        let (awaits, buffer, own) = match begin {
            Err(status) | Ok((FirstStep::Complete(status), _)) => {
                self.ready.push(IoCompletion { token: request.token, status, result: 0 });
                return true;
            }
            Ok((FirstStep::Run { awaits, buffer }, own)) => (awaits, buffer, own),
        };
        if buffer && self.buffers.is_empty() {
            return false;
        }
        let Some(index) = self.free.pop() else { return false };
        let work = &mut self.requests[usize::from(index)];
        work.request = *request;
        work.segments.clear();
        work.segments.extend_from_slice(own);
        (work.awaits, work.done, work.own) = (awaits, 0, Segment::default());
        work.buffer = if buffer { self.buffers.pop() } else { None };
        let next = self.await_job(index, awaits);
        self.execute_step(index, next);
        true
    }

    /// Sets the state of a request and prepares the memory of its job.
    fn await_job(&mut self, index: u16, awaits: AwaitedJob) -> NextRequestStep {
        let FileShared { regions, limits, zeroes, .. } = &*self.loan.shared;
        let work = &mut self.requests[usize::from(index)];
        work.awaits = awaits;
        let chunk_begins = match work.request.operation {
            Operation::Copy => awaits == AwaitedJob::Fetched,
            _ => matches!(awaits, AwaitedJob::Fetched | AwaitedJob::Stored),
        };
        if chunk_begins {
            let whole = work.buffer.map_or(zeroes.segment(), |buffer| self.loan.buffer(buffer));
            work.select_next_chunk(whole, limits.block_size);
        }
        if awaits == AwaitedJob::Stored && work.request.operation == Operation::Write {
            return match copy_request_to_buffer(regions, &work.segments, work.own) {
                Ok(()) => NextRequestStep::Job,
                Err(status) => NextRequestStep::Complete(status),
            };
        }
        NextRequestStep::Job
    }

    /// Executes the next step, and frees the request if that completes it.
    fn execute_step(&mut self, index: u16, next: NextRequestStep) {
        let status = match next {
            NextRequestStep::Complete(status) => status,
            NextRequestStep::Job => match self.submit_engine_job(index) {
                Ok(()) => return,
                Err(SubmitError::InvalidSegment(_)) => IoStatus::DATA_TRANSFER_ERROR,
                Err(SubmitError::Full | SubmitError::TooManySegments) => IoStatus::INTERNAL_ERROR,
            },
        };
        let work = &mut self.requests[usize::from(index)];
        let Request { token, lba, blocks, operation, .. } = work.request;
        let writes =
            matches!(operation, Operation::Write | Operation::WriteZeroes | Operation::Copy);
        if writes && status.is_success() {
            self.loan.shared.uncorrectable.clear(lba, u64::from(blocks));
        }
        self.buffers.extend(work.buffer.take());
        self.free.push(index);
        self.ready.push(IoCompletion { token, status, result: 0 });
    }

    fn submit_engine_job(&mut self, index: u16) -> Result<(), SubmitError> {
        if matches!(
            self.requests[usize::from(index)].awaits,
            AwaitedJob::PriorWritesSynced | AwaitedJob::AllSynced
        ) {
            self.syncs.waiting.push(index);
            self.submit_sync();
            return Ok(());
        }
        let block_size = u64::from(self.loan.shared.limits.block_size);
        let is_direct = self.loan.shared.direct.is_ok();
        let job = self.requests[usize::from(index)].engine_job(block_size, is_direct);
        self.engine.submit(u64::from(index), job)
    }

    /// Submits a sync for all waiting requests, unless one is in flight.
    fn submit_sync(&mut self) {
        let RequestsAwaitingSync { running, waiting, .. } = &mut self.syncs;
        if running.is_empty() && !waiting.is_empty() {
            std::mem::swap(running, waiting);
            let asked = self.engine.submit(SYNC, FileOp::Sync);
            asked.expect(
                "the engine has room for a job of each work, and those that wait have none",
            );
        }
    }

    /// Handles the end of a sync: its result applies to all requests that waited for it.
    #[cold]
    fn handle_sync_result(&mut self, result: Result<(), Errno>) {
        // Before what was acknowledged since: it fails for that, whatever the kernel returns.
        let acknowledged = self.acknowledged;
        if self.syncs.stale > 0 {
            (self.syncs.stale, self.acknowledged) = (self.syncs.stale - 1, 0);
        }
        let mut ended = std::mem::take(&mut self.syncs.ended);
        std::mem::swap(&mut ended, &mut self.syncs.running);
        for index in &ended {
            let next = self.step_after_job(*index, result);
            self.execute_step(*index, next);
        }
        ended.clear();
        self.syncs.ended = ended;
        self.acknowledged = acknowledged;
        self.submit_sync();
    }

    /// The next step after the current job of a request has ended.
    fn step_after_job(&mut self, index: u16, result: Result<(), Errno>) -> NextRequestStep {
        let Self { requests, loan, acknowledged, .. } = self;
        let work = &mut requests[usize::from(index)];
        match (result, work.awaits) {
            (Err(errno), AwaitedJob::Holed | AwaitedJob::Zeroed) if is_unsupported_errno(errno) => {
                self.step_after_unsupported_job(index)
            }
            (Err(errno), _) => self.step_after_failed_job(index, errno),
            (Ok(()), AwaitedJob::PriorWritesSynced)
                if loan.shared.lost_writes.loss_count() > *acknowledged =>
            {
                NextRequestStep::Complete(IoStatus::WRITE_FAULT)
            }
            (Ok(()), AwaitedJob::PriorWritesSynced) => {
                let awaits = if work.buffer.is_some() {
                    AwaitedJob::Fetched
                } else {
                    AwaitedJob::Transferred
                };
                self.await_job(index, awaits)
            }
            (Ok(()), AwaitedJob::Transferred) if !work.request.flags.has(RequestFlags::FUA) => {
                NextRequestStep::Complete(IoStatus::SUCCESS)
            }
            (Ok(()), AwaitedJob::Transferred) if work.is_fua_write() => {
                self.step_after_fua_write(index)
            }
            (Ok(()), AwaitedJob::Transferred | AwaitedJob::AllSynced) => self.step_after_sync(),
            (Ok(()), AwaitedJob::Fetched) => self.step_after_chunk_read(index),
            (Ok(()), AwaitedJob::Stored) => self.step_after_chunk_write(index),
            (Ok(()), AwaitedJob::Holed | AwaitedJob::Zeroed) => self.step_after_data_written(index),
        }
    }

    /// A FUA write has ended. In the page cache it is synced by the channel's own description: the kernel
    /// reports a lost write once per description, and all channels write by the same one.
    fn step_after_fua_write(&mut self, index: u16) -> NextRequestStep {
        if self.loan.shared.direct.is_ok() {
            self.step_after_sync()
        } else {
            self.await_job(index, AwaitedJob::AllSynced)
        }
    }

    /// Status of a request whose data must be on stable storage, as far as the kernel reports.
    fn step_after_sync(&self) -> NextRequestStep {
        if self.has_lost_writes() {
            return NextRequestStep::Complete(IoStatus::WRITE_FAULT);
        }
        self.loan.shared.lost_writes.rearm_report_after_flush();
        NextRequestStep::Complete(IoStatus::SUCCESS)
    }

    /// Whether writes were lost that the owner of this channel has not acknowledged.
    #[inline]
    fn has_lost_writes(&self) -> bool {
        self.loan.shared.lost_writes.loss_count() > self.acknowledged
    }

    fn acknowledge_losses_up_to(&mut self, count: u64) {
        self.acknowledged = self.acknowledged.max(count);
        self.loan.shared.lost_writes.acknowledge_up_to(count);
    }

    #[cold]
    fn step_after_failed_job(&mut self, index: u16, errno: Errno) -> NextRequestStep {
        let FileShared { lost_writes, file, direct, .. } = &*self.loan.shared;
        let work = &self.requests[usize::from(index)];
        if work.request.operation == Operation::Read && file.is_growth_pending() {
            return NextRequestStep::Complete(self.read_zero_padded(index));
        }
        let syncs = matches!(work.awaits, AwaitedJob::PriorWritesSynced | AwaitedJob::AllSynced);
        let is_stable = direct.is_ok() && work.is_fua_write();
        if syncs || (is_stable && may_report_lost_writes(errno)) {
            lost_writes.count_and_report_loss(file.path(), errno);
        }
        NextRequestStep::Complete(if syncs {
            IoStatus::WRITE_FAULT
        } else {
            work.status_of_errno(errno)
        })
    }

    /// A read of a file that is shorter than it will be.
    #[cold]
    fn read_zero_padded(&self, index: u16) -> IoStatus {
        let FileShared { regions, limits, file, .. } = &*self.loan.shared;
        let FileRequest { request, segments, .. } = &self.requests[usize::from(index)];
        let len_bytes = u64::from(request.blocks) * u64::from(limits.block_size);
        let mut bytes = vec![0; usize::try_from(len_bytes).unwrap_or(0)];
        if file.read_with_zero_fill(request.lba * u64::from(limits.block_size), &mut bytes).is_err()
        {
            return IoStatus::UNRECOVERED_READ;
        }
        let mut rest = &bytes[..];
        for segment in segments {
            let (own, more) = rest.split_at(rest.len().min(segment.len_bytes as usize));
            rest = more;
            if regions.store(*segment, own).is_err() {
                return IoStatus::DATA_TRANSFER_ERROR;
            }
        }
        IoStatus::SUCCESS
    }

    /// The file system cannot deallocate or cannot zero a range: the other of the two reads the same, and
    /// zeroes can always be written. A deallocation may as well do nothing.
    fn step_after_unsupported_job(&mut self, index: u16) -> NextRequestStep {
        let FileRequest { request, awaits, .. } = &self.requests[usize::from(index)];
        let (first, second) = zeroing_jobs(request.flags);
        match request.operation {
            Operation::WriteZeroes if *awaits == first => self.await_job(index, second),
            Operation::WriteZeroes => self.await_job(index, AwaitedJob::Stored),
            _ => NextRequestStep::Complete(IoStatus::SUCCESS),
        }
    }

    fn step_after_chunk_read(&mut self, index: u16) -> NextRequestStep {
        let FileShared { regions, limits, .. } = &*self.loan.shared;
        let work = &mut self.requests[usize::from(index)];
        match work.request.operation {
            Operation::Copy => self.await_job(index, AwaitedJob::Stored),
            Operation::Verify => {
                if work.finish_chunk_has_more(limits.block_size) {
                    self.await_job(index, AwaitedJob::Fetched)
                } else {
                    NextRequestStep::Complete(IoStatus::SUCCESS)
                }
            }
            Operation::Compare => NextRequestStep::Complete(compare_buffer_with_request(
                regions,
                work.own,
                &work.segments,
            )),
            Operation::Read => {
                NextRequestStep::Complete(copy_buffer_to_request(regions, work.own, &work.segments))
            }
            _ => NextRequestStep::Complete(IoStatus::SUCCESS),
        }
    }

    fn step_after_chunk_write(&mut self, index: u16) -> NextRequestStep {
        let block_size = self.loan.shared.limits.block_size;
        let work = &mut self.requests[usize::from(index)];
        let more = work.finish_chunk_has_more(block_size);
        match work.request.operation {
            Operation::Write if work.is_fua_write() => self.step_after_fua_write(index),
            Operation::Write => NextRequestStep::Complete(IoStatus::SUCCESS),
            Operation::Copy if more => self.await_job(index, AwaitedJob::Fetched),
            _ if more => self.await_job(index, AwaitedJob::Stored),
            _ => self.step_after_data_written(index),
        }
    }

    /// The blocks are in place. A FUA request syncs them as well.
    fn step_after_data_written(&mut self, index: u16) -> NextRequestStep {
        if self.requests[usize::from(index)].request.flags.has(RequestFlags::FUA) {
            self.await_job(index, AwaitedJob::AllSynced)
        } else {
            NextRequestStep::Complete(IoStatus::SUCCESS)
        }
    }
}

impl<J: FileIo> IoChannel for FileChannel<J> {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, _now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        self.limits.block_count = self.loan.shared.block_count();
        requests.iter().take_while(|request| self.accept_request(request, segments)).count()
    }

    fn flush_submissions(&mut self) {
        self.engine.flush_submissions();
    }

    fn poll(&mut self, _now: Instant, completions: &mut CompletionBatch) -> usize {
        self.engine.poll(&mut self.ended);
        for position in 0..self.ended.len() {
            let JobCompletion { token, result } = self.ended[position];
            if token == SYNC {
                self.handle_sync_result(result);
                continue;
            }
            let Ok(index) = u16::try_from(token) else { continue };
            let next = self.step_after_job(index, result);
            self.execute_step(index, next);
        }
        self.ended.clear();
        self.engine.flush_submissions();
        self.ready.drain_into(completions)
    }

    fn known_write_loss_count(&self) -> u64 {
        self.loan.shared.lost_writes.loss_count()
    }

    /// The owner that has recovered the loss has written it again, and so does not depend on what reads
    /// return.
    fn ack_repaired_write_losses(&mut self, count: u64) {
        self.acknowledge_losses_up_to(count.min(self.known_write_loss_count()));
    }

    /// Only where reads come from the disk: of pages that it could not write, the kernel keeps the new
    /// contents in its cache, marked clean, and forgets them at any time after the next successful flush.
    fn accept_write_losses(&mut self) -> Result<(), Error> {
        let FileShared { direct, file, .. } = &*self.loan.shared;
        if let Err(why) = direct {
            return Err(Error::environment(unreadable_loss_hint(&file.path().display(), *why)));
        }
        self.acknowledge_losses_up_to(self.known_write_loss_count());
        let RequestsAwaitingSync { running, waiting, stale, .. } = &mut self.syncs;
        *stale = u8::from(!running.is_empty()) + u8::from(!waiting.is_empty());
        Ok(())
    }
}

impl<J: FileIo> ChannelWakeup for FileChannel<J> {
    fn wake_at(&self) -> Instant {
        let has_work = !self.ready.is_empty() || self.engine.has_unsubmitted();
        if has_work { Instant::default() } else { Instant::NEVER }
    }

    fn wake_source(&self) -> WakeSource<'_> {
        self.engine.wake_source()
    }

    fn is_done_by_local_kernel(&self) -> bool {
        true
    }

    fn arm(&mut self) -> bool {
        !self.ready.is_empty() || self.engine.arm()
    }

    fn disarm(&mut self) {
        self.engine.disarm();
    }
}

impl RequestsAwaitingSync {
    fn new() -> Self {
        let room = || Vec::with_capacity(usize::from(DEPTH_MAX));
        Self { running: room(), waiting: room(), ended: room(), stale: 0 }
    }
}

/// The first step of a request that has passed validation.
fn first_step(shared: &FileShared, request: &Request, segments: &[Segment]) -> FirstStep {
    let Request { lba, operand, operation, flags, .. } = *request;
    let blocks = u64::from(request.blocks);
    let lost = |first| shared.uncorrectable.any_in(first, blocks);
    let work = |awaits, buffer| FirstStep::Run { awaits, buffer };
    match operation {
        Operation::Flush => work(AwaitedJob::AllSynced, false),
        _ if blocks == 0 => FirstStep::Complete(IoStatus::SUCCESS),
        Operation::Read | Operation::Compare | Operation::Verify if lost(lba) => {
            FirstStep::Complete(IoStatus::UNRECOVERED_READ)
        }
        Operation::Copy if lost(operand) => FirstStep::Complete(IoStatus::UNRECOVERED_READ),
        Operation::Read => {
            let direct = is_aligned_for_direct_io(shared, segments);
            let moves = if direct { AwaitedJob::Transferred } else { AwaitedJob::Fetched };
            work(
                if flags.has(RequestFlags::FUA) { AwaitedJob::PriorWritesSynced } else { moves },
                !direct,
            )
        }
        Operation::Write if is_aligned_for_direct_io(shared, segments) => {
            work(AwaitedJob::Transferred, false)
        }
        Operation::Write => work(AwaitedJob::Stored, true),
        Operation::Compare | Operation::Verify | Operation::Copy => work(AwaitedJob::Fetched, true),
        Operation::WriteZeroes => work(zeroing_jobs(flags).0, false),
        Operation::Deallocate => work(AwaitedJob::Holed, false),
        Operation::WriteUncorrectable => {
            shared.uncorrectable.add(lba, blocks);
            FirstStep::Complete(IoStatus::SUCCESS)
        }
        Operation::CompareAndWrite => FirstStep::Complete(IoStatus::INVALID_OPCODE),
    }
}

/// The two ways of zeroing a range, the requested one first.
fn zeroing_jobs(flags: RequestFlags) -> (AwaitedJob, AwaitedJob) {
    if flags.has(RequestFlags::DEALLOCATE) {
        (AwaitedJob::Holed, AwaitedJob::Zeroed)
    } else {
        (AwaitedJob::Zeroed, AwaitedJob::Holed)
    }
}

/// Whether the memory of a request is aligned for direct I/O. Invalid memory is detected by the engine,
/// which fails the request. Kernel buffers (ublk) are aligned as
/// [`supports_kernel_buffers`](tenmil_base::BlockDevice::supports_kernel_buffers) requires.
pub(super) fn is_aligned_for_direct_io(shared: &FileShared, segments: &[Segment]) -> bool {
    let Ok(alignment) = shared.direct else { return true };
    let (memory, unit) = (alignment.memory_bytes as usize, alignment.offset_bytes);
    segments.iter().all(|segment| {
        let address = shared.regions.host_address(*segment);
        let is_aligned = match address {
            Ok(address) => address.addr().get().is_multiple_of(memory),
            Err(_) => shared.regions.kernel_buffer(*segment).is_some(),
        };
        segment.len_bytes.is_multiple_of(unit) && is_aligned
    })
}

/// Copies the memory of a request into a buffer of the channel.
fn copy_request_to_buffer(
    regions: &RegionTable,
    segments: &[Segment],
    own: Segment,
) -> Result<(), IoStatus> {
    for_each_piece(own, segments, |mine, theirs| {
        regions.copy_segment(theirs, mine).map_err(|_| IoStatus::DATA_TRANSFER_ERROR)
    })
}

/// Copies a buffer of the channel to the memory of a request.
fn copy_buffer_to_request(regions: &RegionTable, own: Segment, segments: &[Segment]) -> IoStatus {
    let copied = for_each_piece(own, segments, |mine, theirs| {
        regions.copy_segment(mine, theirs).map_err(|_| IoStatus::DATA_TRANSFER_ERROR)
    });
    copied.err().unwrap_or(IoStatus::SUCCESS)
}

/// Whether a buffer of the channel and the memory of a request are equal.
fn compare_buffer_with_request(
    regions: &RegionTable,
    own: Segment,
    segments: &[Segment],
) -> IoStatus {
    let compared =
        for_each_piece(own, segments, |mine, theirs| match regions.segments_equal(mine, theirs) {
            Ok(true) => Ok(()),
            Ok(false) => Err(IoStatus::COMPARE_FAILURE),
            Err(_) => Err(IoStatus::DATA_TRANSFER_ERROR),
        });
    compared.err().unwrap_or(IoStatus::SUCCESS)
}

fn for_each_piece(
    own: Segment,
    segments: &[Segment],
    mut each: impl FnMut(Segment, Segment) -> Result<(), IoStatus>,
) -> Result<(), IoStatus> {
    SegmentCursor::new(segments).take_each_piece(u64::from(own.len_bytes), |theirs, done| {
        let mine = u32::try_from(done).ok().and_then(|skip| own.slice(skip, theirs.len_bytes));
        each(mine.ok_or(IoStatus::INTERNAL_ERROR)?, theirs)
    })
}
