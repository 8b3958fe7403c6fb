//! The `io_uring` socket engine: one ring for all sockets of a thread, and one system call per
//! iteration.
//!
//! Each socket has a receive in flight, which fills buffers shared by all sockets; a single socket
//! uses a multishot receive. With several sockets, each holds the buffer being consumed and one
//! more, so that a stalled consumer leaves the rest to the others. Sends are queued and submitted
//! with the next enter. A stream that is polled a second time since the last enter enters again,
//! for all streams: so there is one enter per iteration, without an explicit marker for its start.
//! (A kernel that processes 20 items per enter is entered more often if more have arrived.)
//!
//! The kernel works for the ring only within that enter, and only for the thread that entered first
//! (`DEFER_TASKRUN`, `SINGLE_ISSUER`). A stream sleeps on its socket, which stays readable until
//! the ring is entered.

mod provided_buffers;
mod ring_stream;
mod send_op;
mod socket_slot;
#[cfg(test)]
mod tests;

use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use io_uring::{IoUring, cqueue, opcode, squeue, types};
use rustix::io::Errno;

use self::provided_buffers::{BufferMemory, FilledBuffer, GROUP, ProvidedBuffers};
pub(super) use self::ring_stream::RingStream;
use self::socket_slot::{SocketSlot, StreamEnd};
use super::socket_options::SocketOptions;
use super::socket_stream_factory::SharedSocketStats;

/// Ring and its sockets. Cheap to clone.
#[derive(Clone)]
pub(super) struct SocketRing {
    core: Arc<Mutex<RingState>>,
    memory: BufferMemory,
}

struct RingState {
    uring: IoUring,
    buffers: ProvidedBuffers,
    slots: Vec<Option<Box<SocketSlot>>>,
    /// Entries pushed but not yet submitted.
    unsubmitted: usize,
    /// Number of enters.
    generation: u64,
    is_enabled: bool,
    /// Data arrived for a sleeping stream during an enter of another one.
    has_wakeup: bool,
    /// Error that disabled the ring.
    failed: Option<Errno>,
    /// The ring was entered by the wrong thread; an error of this call only.
    wrong_thread: bool,
    /// Sockets registered in the kernel's file table.
    files: u32,
    /// Sockets in use.
    attached: usize,
    counts: Arc<SharedSocketStats>,
}

/// Kind of an entry; the low byte of its `user_data`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EntryKind {
    Receive,
    /// Send with this number.
    Send(u8),
    Cancel,
}

const ENTRIES: u32 = 512;
/// Size of the completion queue, beyond which the kernel keeps an overflow list.
const COMPLETIONS: u32 = 4096;
/// Sockets in the kernel's file table; further sockets are looked up at each use.
const FILES_MAX: u32 = 256;
/// Maximum buffer length: with many sockets, each buffer holds little data.
const BUFFER_MAX: usize = 32 << 10;
/// Maximum number of buffers: the kernel uses them in turn, and all should stay in the cache.
const BUFFERS_MAX: usize = 64;
/// Buffers that a multishot receive may fill before it can be stopped (`MULTISHOT_MAX_RETRY` in the
/// kernel).
const BURST: usize = 32;
/// Number of unconsumed buffers at which it is stopped.
const RECEIVED_MAX: usize = 16;
/// `IORING_SEND_ZC_REPORT_USAGE`: report whether the data was copied.
const REPORT_USAGE: u16 = 1 << 3;
/// `IORING_ENTER_GETEVENTS`: run deferred work.
const GET_EVENTS: u32 = 1;

impl SocketRing {
    /// Creates a ring, or returns the kernel's error.
    pub(super) fn new(
        options: &SocketOptions,
        counts: Arc<SharedSocketStats>,
    ) -> Result<Self, Errno> {
        let mut builder = IoUring::builder();
        builder.setup_single_issuer().setup_defer_taskrun().setup_r_disabled();
        builder.setup_taskrun_flag().setup_submit_all().setup_cqsize(COMPLETIONS);
        let uring: IoUring = builder.build(ENTRIES).map_err(|error| errno_of(&error))?;
        let count = options.recv_buffers_max.clamp(2, BUFFERS_MAX).next_power_of_two();
        let len_bytes = options.recv_buffer_bytes.min(BUFFER_MAX);
        let buffers = ProvidedBuffers::new(&uring, u16::try_from(count).unwrap_or(2), len_bytes)?;
        // Registration may exceed RLIMIT_NOFILE; then no socket is in the table.
        let has_files = uring.submitter().register_files_sparse(FILES_MAX).is_ok();
        let memory = buffers.memory().clone();
        let core = RingState {
            uring,
            buffers,
            slots: Vec::new(),
            unsubmitted: 0,
            generation: 0,
            is_enabled: false,
            has_wakeup: false,
            failed: None,
            wrong_thread: false,
            files: if has_files { FILES_MAX } else { 0 },
            attached: 0,
            counts,
        };
        Ok(Self { core: Arc::new(Mutex::new(core)), memory })
    }

    /// Locks the state. Used by one thread only, so never contended.
    fn lock_state(&self) -> MutexGuard<'_, RingState> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RingState {
    /// Assigns a key to a slot.
    fn insert_slot(&mut self, slot: SocketSlot) -> u32 {
        let free = self.slots.iter().position(Option::is_none);
        let index = free.unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        self.slots[index] = Some(Box::new(slot));
        u32::try_from(index).unwrap_or(u32::MAX)
    }

    fn slot_mut(&mut self, key: u32) -> &mut SocketSlot {
        let slot = self.slots.get_mut(key as usize).and_then(Option::as_mut);
        slot.expect("a stream has its slot for as long as it lives")
    }

    /// Submits all entries and lets the kernel run its deferred work.
    fn enter_kernel(&mut self) {
        if self.failed.is_some() {
            return;
        }
        // The ring is created disabled: enabling it binds it to this thread (SINGLE_ISSUER).
        if !self.is_enabled {
            self.is_enabled = true;
            if let Err(error) = self.uring.submitter().register_enable_rings() {
                self.failed = Some(errno_of(&error));
                return;
            }
        }
        let count = u32::try_from(self.unsubmitted).unwrap_or(u32::MAX);
        self.counts.enters.add(1);
        let submitter = self.uring.submitter();
        // SAFETY: no argument is passed; what the entries name is kept alive by their slots.
        let entered = unsafe { submitter.enter::<libc::sigset_t>(count, 0, GET_EVENTS, None) };
        match entered {
            Ok(count) => {
                self.unsubmitted = self.unsubmitted.saturating_sub(count);
                self.wrong_thread = false;
            }
            Err(error) => match errno_of(&error) {
                // The rest is submitted by the next enter.
                Errno::INTR | Errno::AGAIN | Errno::BUSY => {}
                // Entered by another thread than the one that enabled the ring.
                Errno::EXIST => self.wrong_thread = true,
                errno => self.failed = Some(errno),
            },
        }
        self.generation += 1;
        self.reap_completions();
    }

    /// Error for the current call, if any.
    fn take_error(&mut self) -> Option<Errno> {
        let is_foreign = std::mem::take(&mut self.wrong_thread);
        self.failed.or(is_foreign.then_some(Errno::EXIST))
    }

    /// Handles the kernel's completions.
    fn reap_completions(&mut self) {
        loop {
            let Some(entry) = self.uring.completion().next() else { return };
            self.handle_completion(&entry);
        }
    }

    fn handle_completion(&mut self, entry: &cqueue::Entry) {
        let (key, kind) = from_user_data(entry.user_data());
        match kind {
            EntryKind::Receive => self.handle_received(key, entry.result(), entry.flags()),
            EntryKind::Send(number) => self.handle_sent(key, number, entry.result(), entry.flags()),
            // The slot may be gone already.
            EntryKind::Cancel => return,
        }
        self.free_if_idle(key);
    }

    fn handle_received(&mut self, key: u32, result: i32, flags: u32) {
        let leased = cqueue::buffer_select(flags).map(|number| {
            let len = usize::try_from(result).unwrap_or(0);
            self.buffers.take_filled(number, len)
        });
        let slot = self.slot_mut(key);
        // MORE is set as long as a multishot receive stays armed.
        slot.is_receiving = cqueue::more(flags);
        let useless = match leased {
            Some(leased) if result > 0 && !slot.is_closed => {
                slot.arrived.push_back(leased);
                None
            }
            useless => useless,
        };
        if result == 0 {
            slot.end.get_or_insert(StreamEnd::End);
        } else if let Some(errno) = receive_error(result) {
            slot.end.get_or_insert(StreamEnd::Broken(errno));
        }
        let wakes = slot.wants_bytes && (!slot.arrived.is_empty() || slot.end.is_some());
        // A multishot receive must not take all buffers: it is stopped, and restarted later.
        let has_plenty = slot.is_receiving && slot.arrived.len() == RECEIVED_MAX;
        self.has_wakeup |= wakes;
        if has_plenty {
            self.cancel_receive(key);
        }
        if let Some(leased) = useless {
            self.buffers.release_buffer(&leased);
        }
    }

    fn handle_sent(&mut self, key: u32, number: u8, result: i32, flags: u32) {
        if cqueue::notif(flags) {
            let copied = u64::from(self.slot_mut(key).handle_notification(number, result));
            self.counts.copied_anyway.add(copied);
            self.has_wakeup |= self.slot_mut(key).wants_space;
            return;
        }
        let slot = self.slot_mut(key);
        let continues = slot.handle_send_completion(number, result, cqueue::more(flags));
        let wakes = slot.wants_space;
        self.has_wakeup |= wakes;
        if continues {
            self.push_send(key, number);
        }
    }

    /// Frees the slot of a closed stream, once the kernel has no operation in flight for it.
    fn free_if_idle(&mut self, key: u32) {
        let slot = self.slot_mut(key);
        if !slot.is_closed || !slot.is_idle() {
            return;
        }
        if slot.file.is_some() && self.failed.is_none() {
            // Ends the kernel's reference to the socket together with ours.
            let _ = self.uring.submitter().register_files_update(key, &[-1]);
        }
        self.slots[key as usize] = None;
    }

    /// Starts a receive, if a buffer is available and the socket may have more data.
    fn start_receiving(&mut self, key: u32) {
        let has_free = self.buffers.kernel_owned_count() > 0;
        // Multishot only for a single socket with enough buffers: a burst may fill many before the
        // receive can be stopped.
        let continues =
            self.attached == 1 && self.buffers.buffer_count() >= BURST + 2 * RECEIVED_MAX;
        let most = if continues { RECEIVED_MAX } else { 1 };
        let slot = self.slot_mut(key);
        if slot.is_receiving || slot.end.is_some() || !has_free || slot.arrived.len() >= most {
            return;
        }
        slot.is_receiving = true;
        slot.is_multishot = continues;
        let descriptor = types::Fd(slot.descriptor());
        let one = |entry: opcode::Recv| {
            entry.buf_group(GROUP).build().flags(squeue::Flags::BUFFER_SELECT)
        };
        let entry = match slot.file {
            Some(file) if continues => opcode::RecvMulti::new(file, GROUP).build(),
            None if continues => opcode::RecvMulti::new(descriptor, GROUP).build(),
            Some(file) => one(opcode::Recv::new(file, std::ptr::null_mut(), 0)),
            None => one(opcode::Recv::new(descriptor, std::ptr::null_mut(), 0)),
        };
        self.push_entry(entry, key, EntryKind::Receive);
    }

    fn cancel_multishot(&mut self) {
        let continues = |slot: &Option<Box<SocketSlot>>| {
            slot.as_ref().is_some_and(|slot| slot.is_receiving && slot.is_multishot)
        };
        let keys = (0_u32..).zip(&self.slots).filter(|(_, slot)| continues(slot));
        for key in keys.map(|(key, _)| key).collect::<Vec<_>>() {
            self.cancel_receive(key);
        }
    }

    fn cancel_receive(&mut self, key: u32) {
        let entry = opcode::AsyncCancel::new(to_user_data(key, EntryKind::Receive)).build();
        self.push_entry(entry, key, EntryKind::Cancel);
    }

    fn push_send(&mut self, key: u32, number: u8) {
        let slot = self.slot_mut(key);
        let file = slot.file;
        let descriptor = types::Fd(slot.descriptor());
        let send = &mut slot.sends[usize::from(number)];
        let by_reference = send.zero_copy;
        let (message, flags) = send.message_header();
        let entry = match file {
            _ if by_reference => {
                self.counts.sends_by_reference.add(1);
                opcode::SendMsgZc::new(descriptor, message)
                    .ioprio(REPORT_USAGE)
                    .flags(flags)
                    .build()
            }
            Some(file) => opcode::SendMsg::new(file, message).flags(flags).build(),
            None => opcode::SendMsg::new(descriptor, message).flags(flags).build(),
        };
        self.push_entry(entry, key, EntryKind::Send(number));
    }

    fn push_entry(&mut self, entry: squeue::Entry, key: u32, kind: EntryKind) {
        let entry = entry.user_data(to_user_data(key, kind));
        // SAFETY: the entry names the socket of its slot and, for a send, a message, a list,
        // headers and region memory that the slot keeps boxed, unchanged and mapped until the
        // kernel's completion. A slot is freed only when it is idle.
        let pushed = unsafe { self.uring.submission().push(&entry) };
        if pushed.is_ok() {
            self.unsubmitted += 1;
            return;
        }
        self.enter_kernel();
        // SAFETY: as above.
        let pushed = unsafe { self.uring.submission().push(&entry) };
        match pushed {
            Ok(()) => self.unsubmitted += 1,
            Err(_) => self.failed = self.failed.or(Some(Errno::BUSY)),
        }
    }

    /// Attaches a socket at its first use, by the thread that owns the ring.
    fn attach_stream(&mut self, key: u32) {
        let has_place = key < self.files;
        let slot = self.slot_mut(key);
        if slot.is_attached {
            return;
        }
        slot.is_attached = true;
        let descriptor = slot.descriptor();
        self.attached += 1;
        if self.attached == 2 {
            // A former single socket no longer uses a multishot receive.
            self.cancel_multishot();
        }
        if !has_place {
            return;
        }
        if !self.is_enabled {
            self.enter_kernel();
        }
        let updated = self.uring.submitter().register_files_update(key, &[descriptor]);
        if updated.is_ok() {
            self.slot_mut(key).file = Some(types::Fixed(key));
        }
    }

    /// Detaches a closed stream: cancels what is in flight for it.
    fn detach_stream(&mut self, key: u32, held: Option<FilledBuffer>) {
        if let Some(leased) = held {
            self.buffers.release_buffer(&leased);
        }
        let slot = self.slot_mut(key);
        slot.is_closed = true;
        let was_used = slot.is_attached;
        (slot.wants_bytes, slot.wants_space) = (false, false);
        let arrived = std::mem::take(&mut slot.arrived);
        self.attached -= usize::from(was_used);
        for leased in &arrived {
            self.buffers.release_buffer(leased);
        }
        // An unused stream has nothing in flight. The first thread that enters owns the ring, so an
        // unused one is not entered here.
        if was_used {
            // Accepted sends are transmitted before the end of the stream, as far as the socket has
            // room.
            self.enter_kernel();
            self.cancel_operations(key);
            self.enter_kernel();
            self.abort_if_memory_held(key);
        }
        self.wrong_thread = false;
        if self.slots[key as usize].is_some() {
            self.free_if_idle(key);
        }
    }

    /// Aborts the connection of a dropped stream that still holds memory for sending, so that the
    /// memory returns to its owner.
    fn abort_if_memory_held(&mut self, key: u32) {
        let Some(slot) = &mut self.slots[key as usize] else { return };
        if slot.has_released() {
            return;
        }
        slot.abort();
        self.enter_kernel();
    }

    fn cancel_operations(&mut self, key: u32) {
        let Some(slot) = &self.slots[key as usize] else { return };
        let receive = slot.is_receiving.then_some(EntryKind::Receive);
        let kinds: Vec<EntryKind> =
            receive.into_iter().chain(slot.sends_in_flight().map(EntryKind::Send)).collect();
        for kind in kinds {
            let entry = opcode::AsyncCancel::new(to_user_data(key, kind)).build();
            self.push_entry(entry, key, EntryKind::Cancel);
        }
    }
}

impl fmt::Debug for SocketRing {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let core = self.lock_state();
        out.debug_struct("Ring")
            .field("slots", &core.slots.len())
            .field("buffers", &core.buffers)
            .field("failed", &core.failed)
            .finish_non_exhaustive()
    }
}

impl Drop for RingState {
    fn drop(&mut self) {
        for mut slot in self.slots.iter_mut().filter_map(Option::take) {
            if !slot.has_released() {
                slot.abort();
            }
            if !slot.is_idle() {
                // The kernel's completion will never be seen, so what it may access is leaked.
                std::mem::forget(slot);
            }
        }
    }
}

/// Error of a receive, unless it only means "nothing now".
fn receive_error(result: i32) -> Option<Errno> {
    let errno = (result < 0).then(|| Errno::from_raw_os_error(-result))?;
    let passes = matches!(errno, Errno::NOBUFS | Errno::AGAIN | Errno::INTR | Errno::CANCELED);
    (!passes).then_some(errno)
}

const RECEIVE: u64 = 0xff;
const CANCEL: u64 = 0xfe;

fn to_user_data(key: u32, kind: EntryKind) -> u64 {
    let low = match kind {
        EntryKind::Receive => RECEIVE,
        EntryKind::Cancel => CANCEL,
        EntryKind::Send(number) => u64::from(number),
    };
    u64::from(key) << 8 | low
}

fn from_user_data(data: u64) -> (u32, EntryKind) {
    let kind = match data & 0xff {
        RECEIVE => EntryKind::Receive,
        CANCEL => EntryKind::Cancel,
        number => EntryKind::Send(u8::try_from(number).unwrap_or(0)),
    };
    (u32::try_from(data >> 8).unwrap_or(u32::MAX), kind)
}

pub(super) fn errno_of(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}
