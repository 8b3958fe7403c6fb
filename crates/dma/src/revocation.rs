//! Revocation of a device's memory access, with an acknowledgment by the device.
//!
//! ```text
//!   host     revoke: number odd ── wake the device ── this number acknowledged? ── no: ask again
//!   device   sees an odd number ── stops, waits for its block devices ── stores the number
//!   host     restore: number even, which no device ever acknowledges
//! ```
//!
//! Each revocation has its own number, so a late acknowledgment of an earlier one has no effect.

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use tenmil_base::Wake;

/// Revocation state of a device.
#[derive(Default)]
pub(crate) struct AccessRevocation {
    /// Odd while the access is revoked.
    number: AtomicU32,
    /// Last number acknowledged by the device.
    let_go: AtomicU32,
    /// Wakes the device, if it has a thread that accesses memory.
    device: Mutex<Option<Box<dyn Wake + Send + Sync>>>,
}

impl AccessRevocation {
    #[inline]
    pub(crate) fn current_number(&self) -> u32 {
        self.number.load(Ordering::Acquire)
    }

    /// Revokes the access. Returns true once the device has acknowledged, or has no thread.
    pub(crate) fn revoke(&self) -> bool {
        let number = self.number.load(Ordering::Relaxed) | 1;
        self.number.store(number, Ordering::SeqCst);
        let device = self.device.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(device) = &*device else { return true };
        // Pairs with the release store in `acknowledge`: all earlier accesses of the device are complete.
        if self.let_go.load(Ordering::Acquire) == number {
            return true;
        }
        device.wake();
        false
    }

    pub(crate) fn restore(&self) {
        let number = self.number.load(Ordering::Relaxed);
        self.number.store(number.wrapping_add(number % 2), Ordering::SeqCst);
    }

    pub(crate) fn acknowledge(&self, number: u32) {
        self.let_go.store(number, Ordering::Release);
    }

    pub(crate) fn attach_device_thread(&self, device: Box<dyn Wake + Send + Sync>) {
        *self.device.lock().unwrap_or_else(PoisonError::into_inner) = Some(device);
    }

    pub(crate) fn detach_device_thread(&self) {
        *self.device.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

impl fmt::Debug for AccessRevocation {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Cut")
            .field("number", &self.number)
            .field("let_go", &self.let_go)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use tenmil_base::Wake;

    use super::AccessRevocation;

    struct Woken(Arc<AtomicU32>);

    impl Wake for Woken {
        fn wake(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn revocation_completes_when_the_device_acknowledges_that_number() {
        let (cut, woken) = (AccessRevocation::default(), Arc::new(AtomicU32::new(0)));
        assert!(cut.revoke(), "no device is attached");
        cut.restore();
        cut.attach_device_thread(Box::new(Woken(Arc::clone(&woken))));
        assert!(!cut.revoke() && !cut.revoke());
        assert_eq!(woken.load(Ordering::Relaxed), 2, "it may be asleep");
        let first = cut.current_number();
        cut.acknowledge(first);
        assert!(cut.revoke());
        cut.restore();
        assert_eq!(cut.current_number() % 2, 0);
        assert!(!cut.revoke(), "what it said of the first says nothing of the second");
        cut.acknowledge(first);
        assert!(!cut.revoke(), "not even if it says it late");
        cut.acknowledge(cut.current_number());
        assert!(cut.revoke());
        cut.restore();
        cut.restore();
        assert!(!cut.revoke());
        cut.detach_device_thread();
        assert!(cut.revoke(), "who is gone touches nothing");
    }
}
