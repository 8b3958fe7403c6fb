//! SIGBUS guard: survives the truncation of foreign mapped files.
//!
//! Another process can truncate a file at any time after this process has mapped it. An access beyond the
//! new end raises SIGBUS, which would end the process. Therefore every mapping of such a file is
//! registered here. The signal handler replaces a failed mapping by empty private memory and records the
//! failure: the accessing thread continues with meaningless bytes, and the owner of the mapping detects
//! the failure through [`SigbusGuard::has_failed`] and disconnects the peer. Any other SIGBUS is passed
//! to the previous handler.
//!
//! ```text
//!   access ─▶ SIGBUS ─▶ registered? ── yes ─▶ replace by empty memory, record ─▶ repeat the access
//!                                   └─ no ──▶ previous handler ────────────────▶ repeat the access
//! ```

use std::io;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Registration of a mapped foreign file, as long as this exists.
#[derive(Debug)]
pub(crate) struct SigbusGuard {
    slot: &'static GuardSlot,
}

/// Registered mapping. `start` is zero if there is none; it is stored last and cleared first.
#[derive(Debug)]
struct GuardSlot {
    start: AtomicUsize,
    len_bytes: AtomicUsize,
    is_taken: AtomicBool,
    has_failed: AtomicBool,
}

/// Number of slots: as many as there are places in a region table.
const SLOTS: usize = 4096;

static TABLE: [GuardSlot; SLOTS] = [const { GuardSlot::unused() }; SLOTS];

/// Previous handler, for unregistered addresses.
static BEFORE: OnceLock<Result<libc::sigaction, i32>> = OnceLock::new();

impl SigbusGuard {
    /// Registers the mapping at `base`. From now on its loss does not end the process.
    ///
    /// # Errors
    ///
    /// All slots are in use, or the handler cannot be installed.
    pub(crate) fn register_mapping(base: NonNull<u8>, len_bytes: usize) -> io::Result<Self> {
        if let Err(errno) = BEFORE.get_or_init(install_handler) {
            return Err(io::Error::from_raw_os_error(*errno));
        }
        let free = |slot: &&GuardSlot| !slot.is_taken.swap(true, Ordering::AcqRel);
        let slot = TABLE.iter().find(free).ok_or(io::ErrorKind::OutOfMemory)?;
        slot.has_failed.store(false, Ordering::Relaxed);
        slot.len_bytes.store(len_bytes, Ordering::Relaxed);
        // Pairs with the acquire load in the handler, which then sees the length.
        slot.start.store(base.as_ptr() as usize, Ordering::Release);
        Ok(Self { slot })
    }

    /// Marks the mapping as failed.
    pub(crate) fn mark_failed(&self) {
        self.slot.has_failed.store(true, Ordering::Release);
    }

    /// Whether the mapping has failed: bytes read from it since then are meaningless.
    pub(crate) fn has_failed(&self) -> bool {
        self.slot.has_failed.load(Ordering::Acquire)
    }
}

impl Drop for SigbusGuard {
    fn drop(&mut self) {
        self.slot.start.store(0, Ordering::Release);
        self.slot.is_taken.store(false, Ordering::Release);
    }
}

impl GuardSlot {
    const fn unused() -> Self {
        Self {
            start: AtomicUsize::new(0),
            len_bytes: AtomicUsize::new(0),
            is_taken: AtomicBool::new(false),
            has_failed: AtomicBool::new(false),
        }
    }

    /// Start and length of the mapping, if it contains `address`.
    fn mapping_of(&self, address: usize) -> Option<(usize, usize)> {
        let start = self.start.load(Ordering::Acquire);
        let len_bytes = self.len_bytes.load(Ordering::Relaxed);
        let is_inside = start != 0 && address.wrapping_sub(start) < len_bytes;
        is_inside.then_some((start, len_bytes))
    }
}

/// Installs the handler and returns the previous one.
fn install_handler() -> Result<libc::sigaction, i32> {
    let last_errno = || io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL);
    let mut ours = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: a sigaction is plain data for which zeroes are valid: no flags, an empty mask.
    let action = unsafe { ours.assume_init_mut() };
    let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
        handle_sigbus;
    action.sa_sigaction = handler as *const () as usize;
    // On the alternate signal stack of the thread: the fault may occur deep in the stack.
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    let mut before = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: both point to a sigaction; the handler only does what is permitted in a signal handler.
    let result = unsafe { libc::sigaction(libc::SIGBUS, action, before.as_mut_ptr()) };
    if result != 0 {
        return Err(last_errno());
    }
    // SAFETY: filled in by the kernel.
    Ok(unsafe { before.assume_init() })
}

/// Signal handler, on the thread that made the access. Uses only atomics and system calls that are
/// permitted in a signal handler.
extern "C" fn handle_sigbus(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: with SA_SIGINFO the kernel passes a siginfo that is valid until the handler returns.
    let info = unsafe { &*info };
    // SAFETY: the siginfo of a SIGBUS has an address.
    let address = unsafe { info.si_addr() } as usize;
    let found = TABLE.iter().find_map(|slot| Some((slot, slot.mapping_of(address)?)));
    if let Some((slot, (start, len_bytes))) = found
        && replace_by_zeroed_memory(start as *mut libc::c_void, len_bytes)
    {
        slot.has_failed.store(true, Ordering::Release);
        return;
    }
    // Not registered: the previous handler gets it when the access is repeated.
    if let Some(Ok(before)) = BEFORE.get() {
        // SAFETY: the sigaction that the kernel returned when the handler was installed.
        unsafe { libc::sigaction(libc::SIGBUS, before, std::ptr::null_mut()) };
    }
}

/// Replaces a mapping by zeroed private memory. Returns false if the kernel has none.
pub(crate) fn replace_by_zeroed_memory(start: *mut libc::c_void, len_bytes: usize) -> bool {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    // SAFETY: the range is a whole mapping of this process, which stays mapped throughout: it is replaced
    // atomically, and accesses by raw pointer see the old bytes or zeroes. No reference into it exists.
    let mapped = unsafe { libc::mmap(start, len_bytes, protection, flags, -1, 0) };
    mapped != libc::MAP_FAILED
}
