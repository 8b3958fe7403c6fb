//! Admin queue: executes one command at a time, from the ring to its completion.
//!
//! ```text
//!   fetch ─▶ data? ─┬─ walk ─▶ from host ─▶ execute ─────────────────▶ complete
//!                   ├─ walk ──────────────▶ execute ─▶ to host ──────▶ complete
//!                   └─────────────────────▶ execute ─▶ deferred ─────▶ complete
//! ```
//!
//! A deferred command (Asynchronous Event Request, long command, queue deletion) does not block the next
//! command. Completions wait in an outbox for a free completion entry; while the outbox is not empty,
//! nothing is fetched.

use std::collections::VecDeque;

use tenmil_base::{
    AccessCompletion, AccessFault, AccessId, AccessProgress, RingMemory, entry_from_dwords,
};
use tenmil_wire::{Command, Completion, DataPointer, Status};

use crate::controller::transport_interface::{
    AdminDataTransfer, AdminResult, ErrorReport, InvalidDoorbell,
};
use crate::data_pointer_walk::{
    ACCESS_BYTES_MAX, CopyState, DataPointerWalk, Direction, HostCopy, HostRanges, LIST_BYTES_MAX,
    LocalBuffer, WalkStep,
};
use crate::doorbell::DoorbellPage;
use crate::queue::ring::{CompletionQueue, SubmissionQueue};

/// Admin queue pair.
pub(super) struct AdminQueue<H: RingMemory> {
    host: H,
    submission: SubmissionQueue<H::Entries>,
    completion: CompletionQueue<H::Entries>,
    page_shift: u8,
    current: Option<ActiveCommand>,
    /// Commands that complete later.
    waiting: Vec<Command>,
    /// Asynchronous Event Requests among them, oldest first.
    event_requests: VecDeque<u16>,
    outbox: VecDeque<Completion>,
    ranges: HostRanges,
    host_copy: HostCopy,
    scratch: Box<[u8]>,
    /// Pending host accesses to remote rings.
    ring_accesses: u32,
    posted: u32,
    is_stopping: bool,
    access_fault: Option<AccessFault>,
}

/// Admin command being executed.
#[derive(Debug)]
struct ActiveCommand {
    command: Command,
    wait: AdminWaitState,
    walk: DataPointerWalk,
    direction: Direction,
    bytes: Vec<u8>,
}

/// Condition that the active command waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AdminWaitState {
    /// The length of its data, from the controller.
    Data,
    /// A part of a PRP list or an SGL.
    List { len_bytes: u32 },
    /// Its data from the host.
    FromHost,
    /// Execution by the controller.
    Execution,
    /// Its data to reach the host.
    ToHost { result: u32 },
}

/// Next work item that the admin queue needs from its transport.
#[derive(Debug)]
pub(super) enum AdminQueueRequest {
    /// Data length of this command; completed through [`AdminQueue::handle_data_answer`].
    Data(Command),
    /// Execution of the command on its data; completed through [`AdminQueue::handle_execution_result`] or
    /// [`AdminQueue::defer_completion`].
    Execution(Command, Vec<u8>),
    /// An entry for the error log.
    Report(ErrorReport),
    /// An invalid doorbell write.
    InvalidDoorbell(InvalidDoorbell),
}

const TICKET_LIST: u32 = 0xf;
const TICKET_FETCH: u32 = 1 << 30;
const TICKET_POST: u32 = 2 << 30;

impl<H: RingMemory> AdminQueue<H> {
    /// Opens the queue described by AQA, ASQ and ACQ.
    pub(super) fn open(
        mut host: H,
        (entries, address): (u32, u64),
        (completion_entries, completion_address): (u32, u64),
        page_shift: u8,
        transfer_bytes_max: u32,
    ) -> Result<Self, AccessFault> {
        let submission = SubmissionQueue::open(&mut host, 0, entries, address)?;
        let completion =
            CompletionQueue::open(&mut host, 0, completion_entries, completion_address)?;
        let ranges_max = ((transfer_bytes_max >> 12) as usize + 2).max(256);
        Ok(Self {
            host,
            submission,
            completion,
            page_shift,
            current: None,
            waiting: Vec::new(),
            event_requests: VecDeque::new(),
            outbox: VecDeque::new(),
            ranges: HostRanges::with_max_ranges(ranges_max),
            host_copy: HostCopy::new(),
            scratch: vec![0; ACCESS_BYTES_MAX.max(LIST_BYTES_MAX)].into(),
            ring_accesses: 0,
            posted: 0,
            is_stopping: false,
            access_fault: None,
        })
    }

    /// Whether there is nothing to do and nothing to report, as in nearly every poll.
    #[inline]
    pub(super) fn is_idle(&self, doorbells: &DoorbellPage) -> bool {
        let has_none = self.current.is_none() && self.outbox.is_empty();
        let is_quiescent = self.ring_accesses == 0 && self.posted == 0;
        has_none && is_quiescent && self.submission.is_caught_up(doorbells)
    }

    /// Advances until the transport has to act. Returns `None` if it does not have to.
    pub(super) fn next_request(&mut self, doorbells: &DoorbellPage) -> Option<AdminQueueRequest> {
        let is_waiting = self.current.is_some() || self.ring_accesses > 0;
        if is_waiting && let Some(request) = self.poll_host_accesses() {
            return Some(request);
        }
        if let Some(invalid) = self.post_entry(doorbells) {
            return Some(invalid);
        }
        if self.current.is_some() {
            return self.next_execution();
        }
        if self.is_stopping || !self.outbox.is_empty() {
            return None;
        }
        self.fetch_command(doorbells)
    }

    /// Answers [`AdminQueueRequest::Data`].
    pub(super) fn handle_data_answer(
        &mut self,
        data: Result<AdminDataTransfer, Status>,
    ) -> Option<AdminQueueRequest> {
        let current = self.current.as_mut()?;
        let (len_bytes, direction) = match data {
            Err(status) => return self.fail_current(status),
            Ok(AdminDataTransfer::None) => {
                current.wait = AdminWaitState::Execution;
                return None;
            }
            Ok(AdminDataTransfer::FromHost(len_bytes)) => (len_bytes, Direction::FromHost),
            Ok(AdminDataTransfer::ToHost(len_bytes)) => (len_bytes, Direction::ToHost),
        };
        current.direction = direction;
        if direction == Direction::FromHost {
            current.bytes.resize(len_bytes as usize, 0);
        }
        let (command, shift) = (current.command, self.page_shift);
        // Admin commands of a memory-based transport use PRPs (Base 2.1 §4.3.2, PCIe 1.1 §3.2).
        if command.psdt() != DataPointer::Prp {
            return self.fail_current(Status::INVALID_FIELD.with_dnr());
        }
        match DataPointerWalk::start(&command, len_bytes, direction, shift, &mut self.ranges) {
            Ok((walk, next)) => {
                current.walk = walk;
                self.supply_lists(next)
            }
            Err(status) => self.fail_current(status),
        }
    }

    /// Answers [`AdminQueueRequest::Execution`] of a command that has completed.
    pub(super) fn handle_execution_result(
        &mut self,
        end: AdminResult,
        bytes: Vec<u8>,
    ) -> Option<AdminQueueRequest> {
        let current = self.current.as_mut()?;
        let sends = current.direction == Direction::ToHost && !self.ranges.as_slice().is_empty();
        if end.status.is_success() && sends && !bytes.is_empty() {
            let len_bytes = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
            current.bytes = bytes;
            current.wait = AdminWaitState::ToHost { result: end.result };
            self.host_copy = HostCopy::new();
            self.host_copy.begin(len_bytes);
            return self.copy_data();
        }
        self.finish_current(end)
    }

    /// Answers [`AdminQueueRequest::Execution`] of a command that completes later; the transport keeps its
    /// identifier.
    pub(super) fn defer_completion(&mut self) {
        self.waiting.extend(self.current.take().map(|current| current.command));
    }

    /// Like [`defer_completion`](Self::defer_completion), for an Asynchronous Event Request.
    pub(super) fn hold_event_request(&mut self, cid: u16) {
        self.defer_completion();
        self.event_requests.push_back(cid);
    }

    /// Removes and returns the oldest outstanding Asynchronous Event Request.
    pub(super) fn take_event_request(&mut self) -> Option<u16> {
        self.event_requests.pop_front()
    }

    pub(super) fn has_event_requests(&self) -> bool {
        !self.event_requests.is_empty()
    }

    /// Removes an outstanding Asynchronous Event Request. Returns false if it is not outstanding.
    pub(super) fn abort_event_request(&mut self, cid: u16) -> bool {
        let at = self.event_requests.iter().position(|request| *request == cid);
        at.is_some_and(|at| self.event_requests.remove(at).is_some())
    }

    /// Completes a deferred command. The transport has to handle the returned request.
    #[must_use]
    pub(super) fn complete_deferred(
        &mut self,
        cid: u16,
        end: AdminResult,
    ) -> Option<AdminQueueRequest> {
        let at = self.waiting.iter().position(|command| command.cid() == cid)?;
        let command = self.waiting.swap_remove(at);
        self.post_completion(&command, end)
    }

    /// Number of completions posted since the last call.
    #[inline]
    pub(super) fn take_posted_count(&mut self) -> u32 {
        core::mem::take(&mut self.posted)
    }

    /// Whether the queue waits for a completion entry or for the host.
    pub(super) fn waits_for_entry_or_host(&self) -> bool {
        self.current.is_some() || self.ring_accesses > 0 || !self.outbox.is_empty()
    }

    /// Stops fetching and completing commands.
    pub(super) fn stop(&mut self) {
        self.is_stopping = true;
        self.outbox.clear();
        self.event_requests.clear();
        self.waiting.clear();
        // A command with a host access in flight is kept: the host may still access its buffer.
        let is_referenced = matches!(
            self.current.as_ref().map(|current| current.wait),
            Some(
                AdminWaitState::List { .. }
                    | AdminWaitState::FromHost
                    | AdminWaitState::ToHost { .. }
            )
        );
        if !is_referenced {
            self.current = None;
        }
    }

    /// Whether no host access is in flight.
    pub(super) fn is_drained(&self) -> bool {
        self.current.is_none() && self.ring_accesses == 0
    }

    pub(super) fn access_fault(&self) -> Option<AccessFault> {
        self.access_fault
    }

    fn fetch_command(&mut self, doorbells: &DoorbellPage) -> Option<AdminQueueRequest> {
        let (waiting, invalid) = self.submission.read_doorbell(doorbells);
        if invalid.is_some() {
            return Some(AdminQueueRequest::InvalidDoorbell(InvalidDoorbell::Value));
        }
        // A command is fetched only if its completion has a free entry.
        if waiting == 0
            || (self.completion.free_count() == 0 && self.refresh_free_entries(doorbells).is_none())
        {
            return None;
        }
        let taken = if self.submission.is_accessed_in_place() {
            self.submission.take_shared_entry().map(Some)
        } else {
            let was_open = self.submission.is_fetching();
            let taken = self.submission.take_remote_entry(&mut self.host, AccessId(TICKET_FETCH));
            self.ring_accesses += u32::from(self.submission.is_fetching() && !was_open);
            taken
        };
        match taken {
            Ok(Some(words)) => {
                let command = Command(words);
                let direction = Direction::FromHost;
                let (wait, walk, bytes) =
                    (AdminWaitState::Data, DataPointerWalk::empty(), Vec::new());
                self.ranges.clear();
                self.current = Some(ActiveCommand { command, wait, walk, direction, bytes });
                Some(AdminQueueRequest::Data(command))
            }
            Ok(None) => None,
            Err(fault) => {
                self.access_fault = Some(fault);
                None
            }
        }
    }

    /// Reads the head doorbell. Returns the number of free entries, or `None` if there is none.
    fn refresh_free_entries(&mut self, doorbells: &DoorbellPage) -> Option<u32> {
        let _ = self.completion.read_doorbell(doorbells);
        Some(self.completion.free_count()).filter(|free_count| *free_count > 0)
    }

    /// Posts completions from the outbox.
    fn post_entry(&mut self, doorbells: &DoorbellPage) -> Option<AdminQueueRequest> {
        while let Some(completion) = self.outbox.front().copied() {
            if self.completion.free_count() == 0 {
                if self.completion.read_doorbell(doorbells).is_some() {
                    return Some(AdminQueueRequest::InvalidDoorbell(InvalidDoorbell::Value));
                }
                if self.completion.free_count() == 0 {
                    return None;
                }
            }
            self.outbox.pop_front();
            let mut entry = completion.0;
            entry[2] = self.submission.head() & 0xffff;
            let entry = entry_from_dwords(entry);
            match self.completion.store_completion(&mut self.host, AccessId(TICKET_POST), entry) {
                Ok(AccessProgress::Done) => self.posted += 1,
                Ok(AccessProgress::Pending) => self.ring_accesses += 1,
                Err(fault) => self.access_fault = Some(fault),
            }
        }
        None
    }

    /// Requests execution of the current command if it is ready for that.
    fn next_execution(&mut self) -> Option<AdminQueueRequest> {
        let current = self.current.as_mut()?;
        (current.wait == AdminWaitState::Execution).then(|| {
            AdminQueueRequest::Execution(current.command, core::mem::take(&mut current.bytes))
        })
    }

    fn supply_lists(&mut self, mut next: WalkStep) -> Option<AdminQueueRequest> {
        loop {
            let current = self.current.as_mut()?;
            let WalkStep::List { iova, len_bytes } = next else { return self.handle_walk_end() };
            let list = &mut self.scratch[..len_bytes as usize];
            let failure = match self.host.read(AccessId(TICKET_LIST), iova, list) {
                Ok(AccessProgress::Done) => {
                    match current.walk.supply_list(list, &mut self.ranges) {
                        Ok(following) => {
                            next = following;
                            continue;
                        }
                        Err(status) => status,
                    }
                }
                Ok(AccessProgress::Pending) => {
                    current.wait = AdminWaitState::List { len_bytes };
                    return None;
                }
                Err(_) => Status::DATA_TRANSFER_ERROR,
            };
            return self.fail_current(failure);
        }
    }

    fn handle_walk_end(&mut self) -> Option<AdminQueueRequest> {
        let current = self.current.as_mut()?;
        if current.direction == Direction::ToHost {
            current.wait = AdminWaitState::Execution;
            return None;
        }
        current.wait = AdminWaitState::FromHost;
        self.host_copy = HostCopy::new();
        self.host_copy.begin(u32::try_from(current.bytes.len()).unwrap_or(u32::MAX));
        self.copy_data()
    }

    fn copy_data(&mut self) -> Option<AdminQueueRequest> {
        let current = self.current.as_mut()?;
        let mut target = LocalBuffer::Bytes(&mut current.bytes);
        let (direction, scratch) = (current.direction, &mut self.scratch);
        let moved = self.host_copy.start_accesses(
            &mut self.host,
            0,
            &self.ranges,
            direction,
            &mut target,
            scratch,
        );
        match (moved, current.wait) {
            (CopyState::Waiting, _) => None,
            (CopyState::Failed, _) => self.fail_current(Status::DATA_TRANSFER_ERROR),
            (CopyState::Done, AdminWaitState::ToHost { result }) => {
                self.finish_current(AdminResult::success_with(result))
            }
            (CopyState::Done, _) if self.is_stopping => self.finish_current(AdminResult::OK),
            (CopyState::Done, _) => {
                current.wait = AdminWaitState::Execution;
                None
            }
        }
    }

    fn fail_current(&mut self, status: Status) -> Option<AdminQueueRequest> {
        self.finish_current(AdminResult::failure(status))
    }

    /// Completes the current command; drops it if the queue is stopping.
    fn finish_current(&mut self, end: AdminResult) -> Option<AdminQueueRequest> {
        let current = self.current.take()?;
        if self.is_stopping { None } else { self.post_completion(&current.command, end) }
    }

    fn post_completion(
        &mut self,
        command: &Command,
        end: AdminResult,
    ) -> Option<AdminQueueRequest> {
        self.outbox.push_back(Completion::new(command.cid(), end.status).with_dw0(end.result));
        (!end.status.is_success()).then_some(AdminQueueRequest::Report(ErrorReport {
            sqid: 0,
            cid: command.cid(),
            opcode: command.opcode(),
            status: end.status,
            lba: 0,
            nsid: command.nsid(),
        }))
    }

    /// Polls completions of host accesses.
    fn poll_host_accesses(&mut self) -> Option<AdminQueueRequest> {
        while let Some(ended) = self.host.poll() {
            let request = match ended.id.0 {
                TICKET_FETCH => {
                    self.handle_ring_access(ended);
                    self.submission.handle_entries_read(&mut self.host, ended);
                    None
                }
                TICKET_POST => {
                    self.handle_ring_access(ended);
                    self.posted += u32::from(ended.result.is_ok());
                    None
                }
                _ => self.handle_data_access(ended),
            };
            if request.is_some() {
                return request;
            }
        }
        None
    }

    fn handle_ring_access(&mut self, ended: AccessCompletion) {
        self.ring_accesses = self.ring_accesses.saturating_sub(1);
        if let Err(fault) = ended.result {
            self.access_fault = Some(fault);
        }
    }

    fn handle_data_access(&mut self, ended: AccessCompletion) -> Option<AdminQueueRequest> {
        let current = self.current.as_mut()?;
        match (current.wait, ended.id.0) {
            (AdminWaitState::List { len_bytes }, TICKET_LIST) => {
                if ended.result.is_err() {
                    return self.fail_current(Status::DATA_TRANSFER_ERROR);
                }
                let list = &mut self.scratch[..len_bytes as usize];
                self.host.copy_out_read_data(ended.id, list);
                if self.is_stopping {
                    return self.finish_current(AdminResult::OK);
                }
                match current.walk.supply_list(list, &mut self.ranges) {
                    Ok(next) => self.supply_lists(next),
                    Err(status) => self.fail_current(status),
                }
            }
            (AdminWaitState::FromHost | AdminWaitState::ToHost { .. }, _) => {
                let mut target = LocalBuffer::Bytes(&mut current.bytes);
                let (direction, scratch) = (current.direction, &mut self.scratch);
                self.host_copy.handle_access_completion(
                    &mut self.host,
                    ended,
                    direction,
                    &mut target,
                    scratch,
                );
                if self.is_stopping {
                    self.host_copy.stop_new_accesses();
                }
                self.copy_data()
            }
            _ => None,
        }
    }
}
