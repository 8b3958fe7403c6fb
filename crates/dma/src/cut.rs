//! Cutting a device off from memory, and hearing from it that it has let go.
//!
//! ```text
//!   host     cut: number odd ── wake the device ── let go of this number? ── no: ask again
//!   device   sees an odd number ── stops, waits for its media ── stores the number
//!   host     reconnect: number even, which no device has ever let go of
//! ```
//!
//! Each cut has a number of its own, so a late word about an earlier one says nothing about this.

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use base::Wake;

/// Whether a device is cut off, and what it has said to that.
#[derive(Default)]
pub(crate) struct Cut {
    /// Odd while the device is cut off.
    number: AtomicU32,
    /// The last number that the device has let go of.
    let_go: AtomicU32,
    /// What wakes the device, as long as it has a thread that touches memory by itself.
    device: Mutex<Option<Box<dyn Wake + Send + Sync>>>,
}

impl Cut {
    #[inline]
    pub(crate) fn number(&self) -> u32 {
        self.number.load(Ordering::Acquire)
    }

    /// True once the device has let go, or there is nobody to wait for.
    pub(crate) fn cut_off(&self) -> bool {
        let number = self.number.load(Ordering::Relaxed) | 1;
        self.number.store(number, Ordering::SeqCst);
        let device = self.device.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(device) = &*device else { return true };
        // Pairs with the release in `let_go`: what the device did before is done.
        if self.let_go.load(Ordering::Acquire) == number {
            return true;
        }
        device.wake();
        false
    }

    pub(crate) fn reconnect(&self) {
        let number = self.number.load(Ordering::Relaxed);
        self.number.store(number.wrapping_add(number % 2), Ordering::SeqCst);
    }

    pub(crate) fn let_go(&self, number: u32) {
        self.let_go.store(number, Ordering::Release);
    }

    pub(crate) fn attach(&self, device: Box<dyn Wake + Send + Sync>) {
        *self.device.lock().unwrap_or_else(PoisonError::into_inner) = Some(device);
    }

    pub(crate) fn detach(&self) {
        *self.device.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

impl fmt::Debug for Cut {
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

    use base::Wake;

    use super::Cut;

    struct Woken(Arc<AtomicU32>);

    impl Wake for Woken {
        fn wake(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_cut_has_worked_once_the_device_has_let_go_of_that_very_cut() {
        let (cut, woken) = (Cut::default(), Arc::new(AtomicU32::new(0)));
        assert!(cut.cut_off(), "nobody is there");
        cut.reconnect();
        cut.attach(Box::new(Woken(Arc::clone(&woken))));
        assert!(!cut.cut_off() && !cut.cut_off());
        assert_eq!(woken.load(Ordering::Relaxed), 2, "it may be asleep");
        let first = cut.number();
        cut.let_go(first);
        assert!(cut.cut_off());
        cut.reconnect();
        assert_eq!(cut.number() % 2, 0);
        assert!(!cut.cut_off(), "what it said of the first says nothing of the second");
        cut.let_go(first);
        assert!(!cut.cut_off(), "not even if it says it late");
        cut.let_go(cut.number());
        assert!(cut.cut_off());
        cut.reconnect();
        cut.reconnect();
        assert!(!cut.cut_off());
        cut.detach();
        assert!(cut.cut_off(), "who is gone touches nothing");
    }
}
