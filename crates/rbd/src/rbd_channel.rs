//! The I/O channel of an image.
//!
//! librbd queues completions on the image and signals an event descriptor for each, so an image has one channel, which is
//! shared by the threads that use it ([`crate::rbd_device`]). Nothing here is called by a thread of librbd.

use std::sync::Arc;

use tenmil_base::{
    ChannelWakeup, CompletionBatch, Instant, IoChannel, IoCompletion, IoStatus, Limits, Operation,
    Request, Segment, Span, WakeSource,
};
use tenmil_block::CompletionQueue;

use crate::ceph_error::{ImageLoss, status_of_errno};
use crate::librbd::{CephErrno, IoRecord, SubmitError};
use crate::open_image::OpenImage;

/// I/O channel of an image.
pub(crate) struct RbdChannel {
    image: Arc<OpenImage>,
    limits: Limits,
    /// Records that are not in flight.
    #[expect(clippy::vec_box, reason = "librbd has the addresses of records")]
    free: Vec<Box<IoRecord>>,
    in_flight: u32,
    /// Completions that librbd has signaled, or is about to signal, and whose signal was not consumed.
    unread_signals: u64,
    /// Records that librbd has completed, until they are handled.
    #[expect(clippy::vec_box, reason = "librbd has the addresses of records")]
    completed: Vec<Box<IoRecord>>,
    ready: CompletionQueue,
}

/// Maximum number of requests in flight. A record is allocated when as many requests are in flight for the first time.
pub(crate) const DEPTH_MAX: u32 = 512;
/// Maximum number of segments of a request: 256 pages and one more for an unaligned start.
pub(crate) const SEGMENTS_MAX: u16 = 257;
/// Maximum number of calls that one poll makes for completions.
const POLLS_MAX: usize = 8;
/// How often a channel that is dropped looks for completions whose signal it may have missed.
const DRAIN_INTERVAL: Span = Span::from_ms(100);

impl RbdChannel {
    pub(crate) fn new(image: &Arc<OpenImage>) -> Self {
        Self {
            image: Arc::clone(image),
            limits: image.limits(),
            free: Vec::new(),
            in_flight: 0,
            unread_signals: 0,
            completed: Vec::new(),
            ready: CompletionQueue::with_depth(DEPTH_MAX),
        }
    }

    /// Starts a request. The status is that of one that completes at once.
    fn start_request(&mut self, request: &Request, segments: &[Segment]) -> Result<(), IoStatus> {
        if self.image.loss().is_some() {
            return Err(IoStatus::NO_DEVICE);
        }
        let own = valid_request_segments(&self.limits, request, segments)?;
        if request.blocks == 0 && request.operation != Operation::Flush {
            return Err(IoStatus::SUCCESS);
        }
        let mut record = self.free.pop().unwrap_or_else(IoRecord::new);
        record.request = *request;
        let block_size = u64::from(self.limits.block_size);
        let (offset, len_bytes) =
            (request.lba.saturating_mul(block_size), u64::from(request.blocks) * block_size);
        let submitted =
            self.image.image().submit(record, request.operation, offset, len_bytes, own);
        let Err((record, why)) = submitted else {
            self.in_flight += 1;
            return Ok(());
        };
        self.free.push(record);
        Err(match why {
            SubmitError::Memory => IoStatus::DATA_TRANSFER_ERROR,
            SubmitError::Refused(errno) => self.status_of_failed(request.operation, errno),
        })
    }

    /// The status of a request that has failed. If the image is lost, the device is removed.
    #[cold]
    fn status_of_failed(&self, operation: Operation, errno: CephErrno) -> IoStatus {
        if let Some(loss) = ImageLoss::from_errno(errno, self.image.is_writable()) {
            self.image.report_loss(loss);
        }
        status_of_errno(errno, operation, self.image.is_writable())
    }

    /// Takes completions from librbd.
    fn take_completed(&mut self) {
        for _ in 0..POLLS_MAX {
            if self.in_flight == 0 || self.image.image().poll(&mut self.completed) == 0 {
                break;
            }
            self.handle_completed();
        }
    }

    fn handle_completed(&mut self) {
        let mut completed = std::mem::take(&mut self.completed);
        for record in completed.drain(..) {
            self.in_flight -= 1;
            self.unread_signals += 1;
            let status = self.status_of_completed(&record);
            self.ready.push(IoCompletion { token: record.request.token, status, result: 0 });
            self.free.push(record);
        }
        self.completed = completed;
    }

    fn status_of_completed(&self, record: &IoRecord) -> IoStatus {
        let Request { operation, blocks, .. } = record.request;
        if record.result < 0 {
            let errno = i32::try_from(record.result.unsigned_abs()).unwrap_or(libc::EIO);
            return self.status_of_failed(operation, CephErrno(errno));
        }
        let len_bytes = i64::from(blocks) * i64::from(self.limits.block_size);
        if operation == Operation::Read && record.result < len_bytes {
            // The image was shortened by another client.
            return IoStatus::LBA_OUT_OF_RANGE;
        }
        IoStatus::SUCCESS
    }

    /// Consumes the signals so far.
    fn read_signals(&mut self) {
        let count = self.image.image().completions().take_signal_count(0);
        self.unread_signals = self.unread_signals.saturating_sub(count);
    }

    fn free_count(&self) -> usize {
        // A completion that waits to be polled still counts.
        (DEPTH_MAX - self.in_flight) as usize - self.ready.len()
    }
}

impl IoChannel for RbdChannel {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, _now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        self.limits.block_count = self.image.block_count();
        let count = requests.len().min(self.free_count());
        for request in &requests[..count] {
            if let Err(status) = self.start_request(request, segments) {
                self.ready.push(IoCompletion { token: request.token, status, result: 0 });
            }
        }
        count
    }

    fn poll(&mut self, _now: Instant, completions: &mut CompletionBatch) -> usize {
        if self.in_flight == 0 && self.unread_signals > 0 {
            // An idle thread is not armed, and a descriptor that stays readable would keep it awake. librbd signals a
            // completion after it has queued it, so the signal may come after the completion was taken.
            self.read_signals();
        }
        self.take_completed();
        self.ready.drain_into(completions)
    }
}

impl ChannelWakeup for RbdChannel {
    fn wake_at(&self) -> Instant {
        if self.ready.is_empty() { Instant::NEVER } else { Instant::default() }
    }

    fn wake_source(&self) -> WakeSource<'_> {
        match self.image.image().completions().descriptor(0) {
            Some(descriptor) => WakeSource::Descriptor(descriptor),
            None => WakeSource::None,
        }
    }

    /// The threads of librbd need the CPUs that a polling thread would take from them.
    fn is_done_by_local_kernel(&self) -> bool {
        true
    }

    fn arm(&mut self) -> bool {
        // Cleared before the last look: a completion that this look does not find signals again.
        self.read_signals();
        self.take_completed();
        !self.ready.is_empty()
    }

    fn disarm(&mut self) {}
}

impl Drop for RbdChannel {
    /// Waits until librbd does not access the memory of any request, which the time limit of requests bounds.
    fn drop(&mut self) {
        let end = self.image.now().after(self.image.drain_limit());
        loop {
            self.take_completed();
            if self.in_flight == 0 {
                return;
            }
            if self.image.now() >= end {
                let (count, name) = (self.in_flight, self.image.name());
                tracing::error!(cause = %name, "{name}: librbd has not completed {count} requests in {}, which is longer \
                     than the limit it was given; their memory may still be written", self.image.drain_limit());
                return;
            }
            // The completions that were just taken are lost: the channel is not polled any more.
            self.ready = CompletionQueue::with_depth(DEPTH_MAX);
            let signaled = self.image.image().completions().wait_for_signal(0, DRAIN_INTERVAL);
            if signaled.is_err() {
                tenmil_linux::named_thread::sleep(DRAIN_INTERVAL);
            }
        }
    }
}

/// The segments of a valid request, or the status to complete it with. Whether the memory exists is checked when its
/// address is resolved.
fn valid_request_segments<'a>(
    limits: &Limits,
    request: &Request,
    segments: &'a [Segment],
) -> Result<&'a [Segment], IoStatus> {
    if !limits.operations.has(request.operation) {
        return Err(IoStatus::INVALID_OPCODE);
    }
    if request.operation == Operation::Flush {
        return Ok(&[]);
    }
    let end = request.lba.checked_add(request.blocks.into());
    if end.is_none_or(|end| end > limits.block_count) {
        return Err(IoStatus::LBA_OUT_OF_RANGE);
    }
    let times = match request.operation {
        Operation::Read | Operation::Write => 1,
        // The expected data and the new data.
        Operation::CompareAndWrite => 2,
        _ => return Ok(&[]),
    };
    let first = request.segment_first as usize;
    let own = segments.get(first..first + usize::from(request.segment_count));
    let own = own.ok_or(IoStatus::INVALID_FIELD)?;
    let len_bytes: u64 = own.iter().map(|segment| u64::from(segment.len_bytes)).sum();
    let is_valid = request.blocks <= limits.request_blocks_max
        && request.segment_count <= limits.segments_max
        && request.metadata_count == 0
        && len_bytes == times * u64::from(request.blocks) * u64::from(limits.block_size);
    if !is_valid {
        return Err(IoStatus::INVALID_FIELD);
    }
    let boundary = u64::from(limits.optimal_boundary_blocks.max(1));
    let last = request.lba + u64::from(request.blocks.max(1)) - 1;
    // An object is what a compare-and-write is atomic in, and librbd rejects one that crosses its end.
    if times == 2 && request.lba / boundary != last / boundary {
        return Err(IoStatus::INVALID_FIELD);
    }
    Ok(own)
}
