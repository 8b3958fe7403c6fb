//! epoll with nanosecond timeouts.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::{io, ptr};

use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use tenmil_base::Span;

/// An epoll instance.
#[derive(Debug)]
pub(crate) struct Epoll {
    descriptor: OwnedFd,
    /// `epoll_pwait2` is missing (kernel before 5.11, or a seccomp filter): timeouts are in
    /// milliseconds.
    coarse: AtomicBool,
}

/// Result of a wait, in a table of fixed size; what does not fit is reported by the next wait.
pub(crate) struct ReadyList {
    events: [libc::epoll_event; EVENTS],
    count: usize,
}

const EVENTS: usize = 32;

impl Epoll {
    pub(crate) fn new() -> io::Result<Self> {
        let descriptor = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        Ok(Self { descriptor, coarse: AtomicBool::new(false) })
    }

    pub(crate) fn add(
        &self,
        source: impl AsFd,
        token: u64,
        flags: epoll::EventFlags,
    ) -> io::Result<()> {
        Ok(epoll::add(&self.descriptor, source, epoll::EventData::new_u64(token), flags)?)
    }

    pub(crate) fn modify(
        &self,
        source: impl AsFd,
        token: u64,
        flags: epoll::EventFlags,
    ) -> io::Result<()> {
        Ok(epoll::modify(&self.descriptor, source, epoll::EventData::new_u64(token), flags)?)
    }

    pub(crate) fn remove(&self, source: impl AsFd) -> io::Result<()> {
        Ok(epoll::delete(&self.descriptor, source)?)
    }

    /// The instance as a descriptor, readable while any of its members is.
    pub(crate) fn as_descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    #[cfg(test)]
    pub(crate) fn use_millisecond_timeouts(&self) {
        self.coarse.store(true, Ordering::Relaxed);
    }

    /// Waits until a descriptor is ready, `at_most` has passed or a signal arrived. A coarse timer
    /// rounds up, never down.
    pub(crate) fn wait(&self, at_most: Span, found: &mut ReadyList) {
        found.count = 0;
        let mut waited = if self.coarse.load(Ordering::Relaxed) {
            self.wait_ms(at_most, found)
        } else {
            self.wait_ns(at_most, found)
        };
        // A seccomp filter may also return EPERM for an unknown system call.
        if matches!(waited, Err(Errno::NOSYS | Errno::PERM)) {
            self.coarse.store(true, Ordering::Relaxed);
            waited = self.wait_ms(at_most, found);
        }
        match waited {
            Ok(count) => found.count = count,
            Err(Errno::INTR) => {}
            Err(errno) => panic!("wait for events: {errno}"),
        }
    }

    fn wait_ns(&self, at_most: Span, found: &mut ReadyList) -> Result<usize, Errno> {
        let limit = Timespec {
            tv_sec: i64::try_from(at_most.ns / 1_000_000_000).unwrap_or(i64::MAX),
            tv_nsec: i64::try_from(at_most.ns % 1_000_000_000).unwrap_or(0),
        };
        // SAFETY: the descriptor is open; the table is a local of the given length; the kernel's
        // 64-bit timespec has the layout of `Timespec`; no signal mask is passed.
        let count = unsafe {
            libc::syscall(
                libc::SYS_epoll_pwait2,
                self.descriptor.as_raw_fd(),
                found.events.as_mut_ptr(),
                EVENTS,
                &raw const limit,
                ptr::null::<libc::sigset_t>(),
                0_usize,
            )
        };
        usize::try_from(count).map_err(|_| last_os_errno())
    }

    fn wait_ms(&self, at_most: Span, found: &mut ReadyList) -> Result<usize, Errno> {
        let limit_ms = i32::try_from(at_most.ns.div_ceil(1_000_000)).unwrap_or(i32::MAX);
        let room = i32::try_from(EVENTS).unwrap_or(i32::MAX);
        let (descriptor, events) = (self.descriptor.as_raw_fd(), found.events.as_mut_ptr());
        // SAFETY: the descriptor is open; the table is a local of the given length.
        let count = unsafe { libc::epoll_wait(descriptor, events, room, limit_ms) };
        usize::try_from(count).map_err(|_| last_os_errno())
    }
}

impl ReadyList {
    pub(crate) fn empty() -> Self {
        Self { events: [libc::epoll_event { events: 0, u64: 0 }; EVENTS], count: 0 }
    }

    /// Whether no descriptor was ready.
    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Whether the table is full, so that more descriptors may be ready.
    pub(crate) fn is_full(&self) -> bool {
        self.count == EVENTS
    }

    /// Tokens of the ready descriptors.
    pub(crate) fn tokens(&self) -> impl Iterator<Item = u64> {
        self.events[..self.count].iter().map(|event| event.u64)
    }
}

fn last_os_errno() -> Errno {
    io::Error::last_os_error().raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)
}
