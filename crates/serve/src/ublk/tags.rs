//! Requests of a ublk queue by tag: a state machine without I/O.
//!
//! ```text
//!                                          ┌── copy in ── Incoming ──┐
//!   Fetching ── arrived ──▶ valid? ── yes ─┤ write                   ├──▶ Submitted ─ completed ─┐
//!      ▲                      │            └── anything else ────────┘                         │
//!      │                      no                                       read ── copy out ── Outgoing
//!      └─────── commit ───────┴────────────────────────────────────────────────────────────────┘
//!
//!   Fetching ── aborted ──▶ Aborted
//! ```
//!
//! With zero copy, a request is submitted with the kernel's buffer (`ZeroCopy`). If the device
//! rejects it, it is submitted again with copied data before the kernel sees an error. So errors
//! are the same in both modes, and a buffer that does not suit the device is no error.

use tenmil_base::{IoCompletion, IoStatus, Operation, Request, Segment};
use tenmil_wire::ublk::IoDescriptor;
use tenmil_wire::ublk::queue::{RES_ABORT, RES_OK};

use super::disk::{DiskRequest, EIO, UblkDisk};

/// Tags of a queue.
#[derive(Debug)]
pub(super) struct TagTable {
    disk: UblkDisk,
    states: Box<[TagState]>,
    /// Buffer of each tag.
    buffers: Box<[Segment]>,
    /// Registered request buffers of the kernel, at an offset by tag, with zero copy.
    kernel_buffers: Option<Segment>,
    /// Number of zero copy requests that the device rejected.
    rejections: u32,
    /// Segment of each tag's data; the segment table of the requests.
    segments: Box<[Segment]>,
    /// Requests to submit to the I/O channel.
    requests: Vec<Request>,
    /// Requests submitted and not completed.
    in_flight: usize,
    /// Number of tags that the kernel has not aborted.
    active_tags: usize,
    done: UblkStats,
    error_text: Option<String>,
}

/// State of a tag: what it waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TagState {
    /// A request from the kernel.
    Fetching,
    /// The data of a write, being copied in.
    Incoming(DiskRequest),
    /// The completion of the I/O channel.
    Submitted(DiskRequest),
    /// The completion of the I/O channel, which uses the kernel's buffer.
    ZeroCopy(DiskRequest),
    /// The data of a read, being copied out.
    Outgoing(DiskRequest),
    /// Nothing: the kernel has aborted it.
    Aborted,
}

/// Next action for a tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TagAction {
    /// None.
    Nothing,
    /// Copy the request's data into the buffer, then call [`TagTable::handle_copy_done`].
    CopyIn { tag: u16, into: Segment },
    /// Copy the buffer to the request's data, then call [`TagTable::handle_copy_done`].
    CopyOut { tag: u16, from: Segment },
    /// Complete the request with this result.
    Commit { tag: u16, result: i32 },
}

/// Completed requests and bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UblkStats {
    /// Requests that succeeded.
    pub succeeded: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Bytes transferred between device and request without a copy in this process.
    pub zero_copy_bytes: u64,
    /// Bytes transferred with a copy.
    pub copied_bytes: u64,
}

impl UblkStats {
    /// Moves bytes that were copied further down from the zero copy count to the copied count.
    #[must_use]
    pub(super) fn move_to_copied(self, bytes: u64) -> Self {
        let bytes = bytes.min(self.zero_copy_bytes);
        let (zero_copy_bytes, copied_bytes) =
            (self.zero_copy_bytes - bytes, self.copied_bytes + bytes);
        Self { zero_copy_bytes, copied_bytes, ..self }
    }
}

/// Number of rejected zero copy requests after which everything is copied.
const REJECTIONS_MAX: u32 = 16;

const ENODATA: i32 = 61;
const ENOLINK: i32 = 67;
const ENOSPC: i32 = 28;
const EOPNOTSUPP: i32 = 95;

impl TagTable {
    /// Creates `depth` tags, all fetching. Each gets a part of `memory` for the largest request.
    ///
    /// # Panics
    ///
    /// If the memory is too short.
    pub(super) fn new(disk: UblkDisk, depth: u16, memory: Segment) -> Self {
        let each = disk.io_bytes_max();
        let place = |tag: u16| {
            memory.slice(u32::from(tag) * each, each).expect("memory for the data of every tag")
        };
        let buffers: Box<[Segment]> = (0..depth).map(place).collect();
        Self {
            disk,
            states: vec![TagState::Fetching; usize::from(depth)].into(),
            segments: buffers.clone(),
            buffers,
            kernel_buffers: None,
            rejections: 0,
            requests: Vec::with_capacity(usize::from(depth)),
            in_flight: 0,
            active_tags: usize::from(depth),
            done: UblkStats::default(),
            error_text: None,
        }
    }

    /// Enables zero copy with the registered buffers of the kernel, at an offset by tag.
    #[must_use]
    pub(super) fn with_zero_copy(self, kernel_buffers: Option<Segment>) -> Self {
        Self { kernel_buffers, ..self }
    }

    /// Queue depth.
    pub(super) fn queue_depth(&self) -> u16 {
        u16::try_from(self.states.len()).unwrap_or(u16::MAX)
    }

    /// Handles the completion of a fetch or commit command. If it delivers a request, `descriptor`
    /// is called for it.
    #[inline]
    pub(super) fn handle_fetched(
        &mut self,
        tag: u64,
        result: i32,
        descriptor: impl FnOnce(u16) -> IoDescriptor,
    ) -> TagAction {
        let index = usize::try_from(tag).unwrap_or(usize::MAX);
        let (Some(state), Ok(tag)) = (self.states.get_mut(index), u16::try_from(tag)) else {
            return self
                .record_error(format!("the kernel completed tag {tag}, which does not exist"));
        };
        if *state != TagState::Fetching {
            return self
                .record_error(format!("the kernel completed tag {tag}, which was not fetching"));
        }
        if result == RES_OK {
            return self.handle_request(tag, &descriptor(tag));
        }
        *state = TagState::Aborted;
        self.active_tags -= 1;
        if result == RES_ABORT {
            return TagAction::Nothing;
        }
        self.record_error(format!("the kernel rejected a command of tag {tag}: {result}"))
    }

    #[inline]
    fn handle_request(&mut self, tag: u16, descriptor: &IoDescriptor) -> TagAction {
        let request = match self.disk.validate_request(descriptor) {
            Ok(request) => request,
            Err(error) => return self.commit_result(tag, -error),
        };
        let index = usize::from(tag);
        if request.len_bytes == 0 {
            self.submit_request(tag, request, TagState::Submitted(request));
            return TagAction::Nothing;
        }
        let Some(kernel_buffers) = self.kernel_buffers else {
            return self.start_copied_request(tag, request);
        };
        let offset = kernel_buffers.offset + u64::from(tag) * u64::from(self.disk.io_bytes_max());
        self.segments[index] = Segment { offset, len_bytes: request.len_bytes, ..kernel_buffers };
        self.submit_request(tag, request, TagState::ZeroCopy(request));
        TagAction::Nothing
    }

    /// Starts a request that copies its data.
    #[inline]
    fn start_copied_request(&mut self, tag: u16, request: DiskRequest) -> TagAction {
        let index = usize::from(tag);
        self.segments[index] = Segment { len_bytes: request.len_bytes, ..self.buffers[index] };
        if request.operation == Operation::Write {
            self.states[index] = TagState::Incoming(request);
            return TagAction::CopyIn { tag, into: self.segments[index] };
        }
        self.submit_request(tag, request, TagState::Submitted(request));
        TagAction::Nothing
    }

    /// Handles the end of a copy.
    #[inline]
    pub(super) fn handle_copy_done(&mut self, tag: u16, is_done: bool) -> TagAction {
        let state = self.states[usize::from(tag)];
        match state {
            TagState::Incoming(request) if is_done => {
                self.submit_request(tag, request, TagState::Submitted(request));
                TagAction::Nothing
            }
            TagState::Outgoing(request) if is_done => self.complete_copied_request(tag, request),
            TagState::Incoming(_) | TagState::Outgoing(_) => self.commit_result(tag, -EIO),
            TagState::Fetching
            | TagState::Submitted(_)
            | TagState::ZeroCopy(_)
            | TagState::Aborted => TagAction::Nothing,
        }
    }

    /// Handles a completion of the I/O channel.
    #[inline]
    pub(super) fn handle_completion(&mut self, completion: IoCompletion) -> TagAction {
        let index = usize::try_from(completion.token).unwrap_or(usize::MAX);
        let (request, is_zero_copy) = match self.states.get(index) {
            Some(TagState::Submitted(request)) => (*request, false),
            Some(TagState::ZeroCopy(request)) => (*request, true),
            _ => {
                return self.record_error(format!(
                    "the device completed {}, which is not in flight",
                    completion.token
                ));
            }
        };
        self.in_flight -= 1;
        let tag = u16::try_from(index).unwrap_or(u16::MAX);
        if is_zero_copy {
            return self.complete_zero_copy(tag, request, completion.status);
        }
        if !completion.status.is_success() {
            return self.commit_result(tag, -errno_of_status(completion.status));
        }
        if request.operation == Operation::Read {
            self.states[index] = TagState::Outgoing(request);
            return TagAction::CopyOut { tag, from: self.segments[index] };
        }
        self.complete_copied_request(tag, request)
    }

    /// Handles the completion of a zero copy request.
    #[inline]
    fn complete_zero_copy(
        &mut self,
        tag: u16,
        request: DiskRequest,
        status: IoStatus,
    ) -> TagAction {
        if status.is_success() {
            self.done.zero_copy_bytes += u64::from(request.len_bytes);
            return self.commit_result(tag, transferred_bytes(request));
        }
        if status == IoStatus::PATH_ERROR {
            // An unreachable device fails copied requests as well.
            return self.commit_result(tag, -errno_of_status(status));
        }
        self.retry_with_copy(tag, request, status)
    }

    #[cold]
    fn retry_with_copy(&mut self, tag: u16, request: DiskRequest, status: IoStatus) -> TagAction {
        self.rejections += 1;
        if self.rejections == 1 {
            let operation = request.operation;
            self.record_error(format!(
                "the device completed a {} of {} bytes without a copy with {status}: \
                 such requests are copied",
                operation.name(),
                request.len_bytes
            ));
        }
        if self.rejections == REJECTIONS_MAX && self.kernel_buffers.take().is_some() {
            self.record_error(format!(
                "{REJECTIONS_MAX} zero-copy requests were rejected: all further requests are copied"
            ));
        }
        self.start_copied_request(tag, request)
    }

    /// Requests to submit, and the segment table indexed by tag.
    #[inline]
    pub(super) fn pending_requests(&self) -> (&[Request], &[Segment]) {
        (&self.requests, &self.segments)
    }

    /// Records that the I/O channel accepted the first `count` of them.
    #[inline]
    pub(super) fn record_submitted(&mut self, count: usize) {
        self.in_flight += count;
        self.requests.drain(..count);
    }

    /// Requests submitted and not completed.
    #[inline]
    pub(super) fn in_flight_requests(&self) -> usize {
        self.in_flight
    }

    /// Whether the kernel has aborted all tags.
    #[inline]
    pub(super) fn is_stopped_by_kernel(&self) -> bool {
        self.active_tags == 0
    }

    pub(super) fn completed_stats(&self) -> UblkStats {
        self.done
    }

    /// Next protocol violation to report; the first of several is kept.
    #[inline]
    pub(super) fn next_error(&mut self) -> Option<String> {
        self.error_text.take()
    }

    #[inline]
    fn submit_request(&mut self, tag: u16, request: DiskRequest, state: TagState) {
        self.states[usize::from(tag)] = state;
        self.requests.push(Request {
            token: u64::from(tag),
            lba: request.lba,
            operand: 0,
            segment_first: u32::from(tag),
            blocks: request.blocks,
            segment_count: u16::from(request.len_bytes > 0),
            metadata_count: 0,
            operation: request.operation,
            flags: request.flags,
        });
    }

    /// Counts copied bytes and completes the request.
    #[inline]
    fn complete_copied_request(&mut self, tag: u16, request: DiskRequest) -> TagAction {
        self.done.copied_bytes += u64::from(request.len_bytes);
        self.commit_result(tag, transferred_bytes(request))
    }

    #[inline]
    fn commit_result(&mut self, tag: u16, result: i32) -> TagAction {
        self.states[usize::from(tag)] = TagState::Fetching;
        let count = if result < 0 { &mut self.done.failed } else { &mut self.done.succeeded };
        *count += 1;
        TagAction::Commit { tag, result }
    }

    #[cold]
    fn record_error(&mut self, text: String) -> TagAction {
        self.error_text.get_or_insert(text);
        TagAction::Nothing
    }
}

/// Result of a successful request: the number of bytes transferred.
#[inline]
fn transferred_bytes(request: DiskRequest) -> i32 {
    i32::try_from(request.len_bytes).unwrap_or(i32::MAX)
}

/// Error number that the block layer maps to the closest status (`blk_errors`).
#[cold]
fn errno_of_status(status: IoStatus) -> i32 {
    match status {
        IoStatus::INVALID_OPCODE => EOPNOTSUPP,
        IoStatus::CAPACITY_EXCEEDED => ENOSPC,
        IoStatus::UNRECOVERED_READ => ENODATA,
        IoStatus::PATH_ERROR => ENOLINK,
        _ => EIO,
    }
}
