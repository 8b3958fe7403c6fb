//! NVMe/TCP connection as the transport of an I/O queue pair, in the thread that submits to it.
//!
//! ```text
//!   submit ─────▶ capsule in the connection's send queue ── flush ──▶ one gathered send
//!   complete ◀──────────────────────── completion ◀── receive ◀────── stream
//! ```
//!
//! The connection is the attachment of the queue's link: it comes with `Running`, and is closed when the
//! queue is frozen, which the controller thread is [notified](QueueReport) of. A command that is submitted
//! without a connection is dropped; it stays in its slot until the old controller can no longer execute
//! commands.

use std::collections::VecDeque;
use std::sync::Arc;

use tenmil_base::{DoorbellStats, Instant, IoCompletion, IoStatus};
use tenmil_nvme_host::{NamespaceView, PointerOf, QueuePair, SplitTracker, Transport};
use tenmil_nvme_tcp::CannotSubmit;
use tenmil_wire::{Command, DataPointer, Status};

use crate::cache_tracker::Association;
use crate::queue_connection::{CommandData, CompletedCommand, QueueConnection, direction_of};
use crate::queue_report::{ClosedQueue, QueueReport};
use crate::remote_dma::RemoteDma;
use crate::segment_lists::{SegmentLists, SegmentPointer};
use crate::stall_detector::StallDetector;
use crate::wait_handle::WaitHandle;
use crate::zero_copy_drain::ZeroCopyDrain;

/// Transport of one I/O queue: a connection, while there is one.
pub struct TcpTransport {
    report: Arc<QueueReport>,
    attached: Option<Box<AttachedQueue>>,
    /// Commands that the connection does not accept yet.
    waiting: VecDeque<WaitingCommand>,
    /// Completions that had no space in the poll that received them.
    completed: VecDeque<(u16, IoStatus, u32)>,
    is_busy: bool,
    /// Commands were submitted since the last flush.
    has_new: bool,
    /// The previous connection, whose memory the kernel still reads, and the report to deliver once it is
    /// drained.
    drain: Option<Box<(ZeroCopyDrain, ClosedQueue)>>,
    /// The thread's wait handle watches the connection.
    is_watched: bool,
    /// The last connection was lost by itself, and there is no new one yet.
    is_broken: bool,
    /// The association of the last connection, which its completions belong to.
    association: Option<Arc<Association>>,
    /// Flushes that announced commands.
    flushes: u64,
    dma: RemoteDma,
    depth: u16,
}

/// A connection of the queue.
pub struct AttachedQueue {
    pub(crate) connection: QueueConnection,
    /// Detects a stalled connection.
    pub(crate) stall_detector: StallDetector,
    /// The association of the connection.
    pub(crate) association: Arc<Association>,
}

/// A command that the connection does not accept yet.
struct WaitingCommand {
    command: Command,
    data: CommandData,
}

impl TcpTransport {
    /// A transport without a connection, for `depth` commands in flight.
    pub(crate) fn new(report: Arc<QueueReport>, dma: RemoteDma, depth: u16) -> Self {
        Self {
            report,
            attached: None,
            waiting: VecDeque::new(),
            completed: VecDeque::new(),
            is_busy: false,
            has_new: false,
            drain: None,
            is_watched: false,
            is_broken: false,
            association: None,
            flushes: 0,
            dma,
            depth,
        }
    }

    /// Drains a closed connection. Called in every poll, whatever the state of the queue pair.
    #[inline]
    pub(crate) fn poll_drain(&mut self, now: Instant) {
        if self.attached.is_none() {
            self.report_if_drained(now);
        }
    }

    /// Prepares for commands: from now on the queue counts as busy. If the queue was frozen meanwhile, the
    /// controller may already count it as closed, and nothing may be sent.
    #[cold]
    fn mark_busy(&mut self) {
        if self.attached.is_none() {
            return;
        }
        self.is_busy = true;
        if !self.report.set_busy() {
            self.close();
        }
    }

    /// The connection, if it accepts commands at once.
    #[inline]
    fn accepting_connection(&mut self) -> Option<&mut AttachedQueue> {
        if !self.is_busy {
            self.mark_busy();
        }
        let is_queue_empty = self.waiting.is_empty();
        self.attached
            .as_deref_mut()
            .filter(|attached| is_queue_empty && !attached.stall_detector.is_probing())
    }

    /// Submits a command that the connection may not accept.
    #[cold]
    fn submit_later(&mut self, command: Command, data: CommandData) {
        if self.attached.is_some() {
            self.waiting.push_back(WaitingCommand { command, data });
        }
    }

    /// Submits waiting commands, as the connection accepts them.
    #[cold]
    fn submit_waiting(&mut self) {
        let Some(attached) = &mut self.attached else { return self.waiting.clear() };
        while let Some(WaitingCommand { command, data }) = self.waiting.pop_front() {
            if attached.stall_detector.is_probing() {
                return self.waiting.push_front(WaitingCommand { command, data });
            }
            if let Err((CannotSubmit, data)) = attached.connection.submit(&command, data) {
                return self.waiting.push_front(WaitingCommand { command, data });
            }
        }
    }

    /// Sends what is pending.
    #[inline]
    pub(crate) fn send(&mut self) {
        if !self.waiting.is_empty() {
            self.submit_waiting();
        }
        let Some(attached) = &mut self.attached else { return };
        let AttachedQueue { connection, stall_detector, .. } = &mut **attached;
        let completed = &mut self.completed;
        connection.send(&mut |command| {
            if !stall_detector.is_probe(command.cid) {
                completed.push_back(completion_fields(command));
            }
        });
        if connection.loss().is_some() {
            self.lose_connection();
        }
    }

    /// Receives data, and passes completions to `complete`, or holds them while that returns false.
    #[inline]
    fn receive(&mut self, now: Instant, mut complete: impl FnMut(u16, IoStatus, u32) -> bool) {
        while let Some((cid, status, result)) = self.completed.pop_front() {
            if !complete(cid, status, result) {
                return self.completed.push_front((cid, status, result));
            }
        }
        let Some(attached) = &mut self.attached else { return };
        let AttachedQueue { connection, stall_detector, .. } = &mut **attached;
        let completed = &mut self.completed;
        connection.receive(now, &mut |command| {
            if stall_detector.is_probe(command.cid) {
                return;
            }
            let (cid, status, result) = completion_fields(command);
            if !complete(cid, status, result) {
                completed.push_back((cid, status, result));
            }
        });
        if now >= stall_detector.next_check() {
            stall_detector.check(now, connection);
        }
        if now >= connection.deadline() {
            connection.check_timeouts(now);
        }
        if connection.loss().is_some() {
            return self.lose_connection();
        }
        if self.is_busy && connection.outstanding_count() == 0 && self.waiting.is_empty() {
            self.is_busy = false;
            self.report.set_idle();
        }
    }

    /// Whether there is a connection.
    #[inline]
    pub(crate) fn is_connected(&self) -> bool {
        self.attached.is_some()
    }

    /// The association that the last completions belong to.
    #[inline]
    pub(crate) fn association(&self) -> Option<&Association> {
        self.association.as_deref()
    }

    /// Whether the last connection was lost by itself.
    pub(crate) fn is_connection_lost(&self) -> bool {
        self.is_broken
    }

    /// Latest time of the next poll.
    pub(crate) fn wake_at(&self) -> Instant {
        match (&self.attached, &self.drain) {
            _ if !self.completed.is_empty() => Instant::default(),
            (Some(attached), _) if self.is_busy => {
                attached.connection.deadline().min(attached.stall_detector.next_check())
            }
            (Some(attached), _) => attached.connection.deadline(),
            (None, Some(drain)) => drain.0.wake_at(),
            (None, None) => Instant::NEVER,
        }
    }

    /// Closes the connection, if there is one.
    #[cold]
    fn close(&mut self) {
        self.is_busy = false;
        self.waiting.clear();
        if let Some(attached) = self.attached.take() {
            self.end_connection(*attached, None);
        }
    }

    /// Handles the loss of the connection.
    #[cold]
    fn lose_connection(&mut self) {
        let Some(attached) = self.attached.take() else { return };
        let lost = attached.connection.loss().map(ToString::to_string);
        (self.is_busy, self.is_broken) = (false, true);
        self.waiting.clear();
        self.end_connection(*attached, lost);
    }

    /// Closes a connection, and reports that once its memory is released.
    fn end_connection(&mut self, attached: AttachedQueue, lost: Option<String>) {
        let connection = attached.connection;
        // Whether a command was outstanding that would do harm if it were executed late.
        let may_execute_late = connection.may_execute_late(false);
        let closed = ClosedQueue { lost, may_execute_late };
        match ZeroCopyDrain::begin(connection, may_execute_late) {
            Some(drain) => self.drain = Some(Box::new((drain, closed))),
            None => self.report.report(closed),
        }
    }

    /// Reports a closed connection once its memory is released.
    fn report_if_drained(&mut self, now: Instant) {
        let drain = self.drain.take_if(|drain| drain.0.poll_drained(now));
        if let Some(drain) = drain {
            self.report.report(drain.1);
        }
    }

    /// Arms the wake source of the connection. Returns true if there is work already, or it could come
    /// without a signal.
    pub(crate) fn arm_connection(&mut self, wait_handle: &mut dyn WaitHandle) -> bool {
        if !self.completed.is_empty() {
            return true;
        }
        let Some(attached) = &mut self.attached else { return false };
        if !self.is_watched {
            self.is_watched = wait_handle.watch(attached.connection.wake_source());
        }
        !self.is_watched || attached.connection.arm()
    }

    pub(crate) fn disarm(&mut self) {
        if let Some(attached) = &mut self.attached {
            attached.connection.disarm();
        }
    }
}

impl Transport for TcpTransport {
    type Pointers = SegmentLists;
    type Attachment = Box<AttachedQueue>;

    fn create_data_pointers(&self, _: &NamespaceView, depth: u32) -> Option<SegmentLists> {
        SegmentLists::allocate(&self.dma, depth)
    }

    fn depth(&self) -> u16 {
        self.depth
    }

    #[inline(always)]
    fn submit_each<I>(
        &mut self,
        items: &[I],
        mut make: impl FnMut(&I) -> Option<(Command, PointerOf<Self>)>,
    ) -> usize {
        let mut count = 0;
        self.has_new = true;
        while let Some(item) = items.get(count)
            && let Some((command, pointer)) = make(item)
        {
            count += 1;
            let SegmentPointer::Contiguous(segment) = pointer else {
                unreachable!("a run has contiguous memory");
            };
            let direction = direction_of(&command, segment.len_bytes);
            let submitted = match self.accepting_connection() {
                Some(attached) => attached.connection.submit_segment(&command, direction, segment),
                None => Err(CannotSubmit),
            };
            if submitted.is_err() {
                self.submit_later(command, CommandData::Segment(direction, segment));
            }
        }
        count
    }

    fn submit(
        &mut self,
        command: Command,
        pointer: SegmentPointer,
        mut lists: Option<&mut SegmentLists>,
    ) {
        self.has_new = true;
        let data = match command_data(&command, pointer, lists.as_deref_mut()) {
            Ok(data) => data,
            Err(status) => {
                self.completed.push_back((command.cid(), IoStatus(status.0), 0));
                return;
            }
        };
        let Some(attached) = self.accepting_connection() else {
            return self.submit_later(command, data);
        };
        match attached.connection.submit(&command, data) {
            Ok(()) => {
                if let (SegmentPointer::Listed { slot, .. }, Some(lists)) = (pointer, lists) {
                    lists.return_list(slot, attached.connection.take_replaced_list());
                }
            }
            Err((CannotSubmit, data)) => self.submit_later(command, data),
        }
    }

    #[inline]
    fn flush(&mut self, _: u32) {
        if core::mem::take(&mut self.has_new) {
            self.flushes += 1;
        }
        self.send();
    }

    #[inline(always)]
    fn receive_completions<P: SplitTracker>(
        pair: &mut QueuePair<Self>,
        now: Instant,
        slots: &mut [IoCompletion],
        parents: &mut P,
    ) -> usize {
        pair.receive_with(slots, parents, |transport, sink| {
            transport.receive(
                now,
                #[inline(always)]
                |cid, status, result| {
                    let has_space = !sink.is_full();
                    if has_space {
                        sink.complete(cid, status, result);
                    }
                    has_space
                },
            );
        })
    }

    fn arm(&mut self, accepts: bool) -> bool {
        accepts && !self.completed.is_empty()
    }

    fn attach(&mut self, attached: Box<AttachedQueue>) {
        debug_assert!(self.attached.is_none() && self.drain.is_none(), "it was released");
        self.association = Some(Arc::clone(&attached.association));
        self.attached = Some(attached);
        (self.is_watched, self.is_broken) = (false, false);
    }

    fn stop_sending(&mut self) {
        self.close();
    }

    fn drop_outstanding(&mut self) {
        self.close();
        self.completed.clear();
    }

    fn doorbell_stats(&self, _: u64) -> DoorbellStats {
        DoorbellStats { submission: self.flushes, ..DoorbellStats::default() }
    }
}

/// Data of a command with this pointer, or why the transport cannot transfer them.
pub(crate) fn command_data(
    command: &Command,
    pointer: SegmentPointer,
    lists: Option<&mut SegmentLists>,
) -> Result<CommandData, Status> {
    let (has_data, is_bidirectional) =
        (command.opcode() & 0b11 != 0, command.opcode() & 0b11 == 0b11);
    let has_own_pointer = command.prp1() != 0 || command.psdt() != DataPointer::Prp;
    Ok(match pointer {
        // An address of its own means nothing to this transport.
        SegmentPointer::None if has_data && has_own_pointer => return Err(Status::INVALID_FIELD),
        SegmentPointer::None => CommandData::None,
        _ if is_bidirectional => return Err(Status::INVALID_OPCODE),
        _ if !has_data => CommandData::None,
        SegmentPointer::Contiguous(segment) => {
            CommandData::Segment(direction_of(command, segment.len_bytes), segment)
        }
        SegmentPointer::KernelBuffer(segment) => {
            CommandData::KernelBuffer(direction_of(command, segment.len_bytes), segment)
        }
        SegmentPointer::Listed { slot, len_bytes } => {
            let list = lists.map(|lists| lists.take_list(slot)).unwrap_or_default();
            CommandData::List(direction_of(command, len_bytes), list)
        }
    })
}

/// Fields of a completion.
#[inline]
pub(crate) fn completion_fields(command: CompletedCommand) -> (u16, IoStatus, u32) {
    let CompletedCommand { cid, completion } = command;
    let status = completion.status();
    // Only a host may use this status (NVM Express Base 2.1, section 4.2.3.4), and it would cause endless
    // retries.
    let status = if status.has_same_code_as(Status::ABORTED_BY_HOST) {
        Status::INTERNAL_PATH_ERROR
    } else {
        status
    };
    (cid, IoStatus(status.0), completion.dw0())
}

impl Drop for TcpTransport {
    fn drop(&mut self) {
        self.close();
        if let Some(drain) = self.drain.take() {
            self.report.leave_undrained(*drain);
        }
    }
}
