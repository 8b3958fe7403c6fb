//! What happens when somebody else's memory is not there any more.
//!
//! A file that another process has given us to map can be made shorter by it at any time; whoever
//! touches what was cut off is sent SIGBUS, which ends a process. So every mapping of such a file is
//! entered here. The handler puts empty private memory in the place of a mapping that has failed and
//! remembers that: whoever touched it goes on, with bytes that mean nothing, and whoever has the
//! mapping finds out by [`Guard::has_failed`] and lets go of the peer. A SIGBUS anywhere else is
//! what it was before: the handler that was there gets it.
//!
//! ```text
//!   touch ─▶ SIGBUS ─▶ entered here? ── yes ─▶ empty memory in its place, remembered ─▶ touch again
//!                                    └─ no ──▶ the handler from before ──────────────▶ touch again
//! ```

use std::io;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// A mapping of somebody else's file, entered for as long as this lives.
#[derive(Debug)]
pub(crate) struct Guard {
    slot: &'static Slot,
}

/// A mapping that may fail. `start` is zero if there is none; it is stored last and cleared first.
#[derive(Debug)]
struct Slot {
    start: AtomicUsize,
    len_bytes: AtomicUsize,
    is_taken: AtomicBool,
    has_failed: AtomicBool,
}

/// As many as there are places in a table of regions.
const SLOTS: usize = 4096;

static TABLE: [Slot; SLOTS] = [const { Slot::empty() }; SLOTS];

/// What was there before: for what is not ours.
static BEFORE: OnceLock<Result<libc::sigaction, i32>> = OnceLock::new();

impl Guard {
    /// Enters what lies at `base`. From now on losing it does not end the process.
    ///
    /// # Errors
    ///
    /// If too much is entered already, or the kernel wants no handler.
    pub(crate) fn enter(base: NonNull<u8>, len_bytes: usize) -> io::Result<Self> {
        if let Err(errno) = BEFORE.get_or_init(install) {
            return Err(io::Error::from_raw_os_error(*errno));
        }
        let free = |slot: &&Slot| !slot.is_taken.swap(true, Ordering::AcqRel);
        let slot = TABLE.iter().find(free).ok_or(io::ErrorKind::OutOfMemory)?;
        slot.has_failed.store(false, Ordering::Relaxed);
        slot.len_bytes.store(len_bytes, Ordering::Relaxed);
        // Pairs with the acquire in the handler: it sees the length of what it finds.
        slot.start.store(base.as_ptr() as usize, Ordering::Release);
        Ok(Self { slot })
    }

    /// It counts as lost.
    pub(crate) fn fail(&self) {
        self.slot.has_failed.store(true, Ordering::Release);
    }

    /// Whether it was lost: what is read there since then means nothing.
    pub(crate) fn has_failed(&self) -> bool {
        self.slot.has_failed.load(Ordering::Acquire)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.slot.start.store(0, Ordering::Release);
        self.slot.is_taken.store(false, Ordering::Release);
    }
}

impl Slot {
    const fn empty() -> Self {
        Self {
            start: AtomicUsize::new(0),
            len_bytes: AtomicUsize::new(0),
            is_taken: AtomicBool::new(false),
            has_failed: AtomicBool::new(false),
        }
    }

    /// What is entered, if `address` lies there.
    fn around(&self, address: usize) -> Option<(usize, usize)> {
        let start = self.start.load(Ordering::Acquire);
        let len_bytes = self.len_bytes.load(Ordering::Relaxed);
        let is_inside = start != 0 && address.wrapping_sub(start) < len_bytes;
        is_inside.then_some((start, len_bytes))
    }
}

/// Puts the handler in place, and says what was there before.
fn install() -> Result<libc::sigaction, i32> {
    let last_errno = || io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL);
    let mut ours = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: a sigaction is plain data, of which zeroes are a value: no flags, an empty mask.
    let action = unsafe { ours.assume_init_mut() };
    let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = on_bus;
    action.sa_sigaction = handler as *const () as usize;
    // On the stack that threads have for this: the fault may lie deep.
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    let mut before = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: both point to a sigaction; the handler does only what is allowed in one.
    let result = unsafe { libc::sigaction(libc::SIGBUS, action, before.as_mut_ptr()) };
    if result != 0 {
        return Err(last_errno());
    }
    // SAFETY: the kernel has filled it in.
    Ok(unsafe { before.assume_init() })
}

/// Runs on whichever thread touched what is not there. It loads and stores atomics and makes system
/// calls, all of which may be done in a handler.
extern "C" fn on_bus(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: with SA_SIGINFO the kernel passes a siginfo, which is there until this returns.
    let info = unsafe { &*info };
    // SAFETY: that of a SIGBUS has an address.
    let address = unsafe { info.si_addr() } as usize;
    let found = TABLE.iter().find_map(|slot| Some((slot, slot.around(address)?)));
    if let Some((slot, (start, len_bytes))) = found
        && put_empty_memory(start as *mut libc::c_void, len_bytes)
    {
        slot.has_failed.store(true, Ordering::Release);
        return;
    }
    // Not ours: let the one from before have it, when the access is made again.
    if let Some(Ok(before)) = BEFORE.get() {
        // SAFETY: it is what the kernel told when ours was put in place.
        unsafe { libc::sigaction(libc::SIGBUS, before, std::ptr::null_mut()) };
    }
}

/// Puts zeroed private memory where something was mapped. False if the kernel has none.
pub(crate) fn put_empty_memory(start: *mut libc::c_void, len_bytes: usize) -> bool {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    // SAFETY: the range is a whole mapping of ours, which stays mapped throughout: it is replaced in
    // one step, and whoever moves bytes there by raw pointer meets the old bytes or zeroes. Nobody
    // holds a reference into it.
    let mapped = unsafe { libc::mmap(start, len_bytes, protection, flags, -1, 0) };
    mapped != libc::MAP_FAILED
}
