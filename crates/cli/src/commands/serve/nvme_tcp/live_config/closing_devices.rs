//! Closing of removed devices off the reactors.
//!
//! Closing a device may block: a thread is joined, a controller shut down, a pool written. The last
//! reference may belong to a connection on a reactor, which must not block. So a removed device stays
//! here until all other references are gone, and is closed by the caller's thread.

use tenmil_base::Span;
use tenmil_block::Bdev;
use tenmil_linux::Clock;

/// Interval between checks of what a caller waits for.
const CHECK_INTERVAL: Span = Span::from_ms(2);

/// Removed devices that wait to be closed.
#[derive(Default)]
pub(super) struct ClosingDevices(Vec<RemovedDevice>);

struct RemovedDevice {
    device: Bdev,
    /// Whether the previous check found no other reference. A user that has released its claim may
    /// still be dropping the rest.
    is_free: bool,
}

impl ClosingDevices {
    /// Keeps a device until it is unused.
    pub(super) fn add_device(&mut self, device: Bdev) {
        self.0.push(RemovedDevice { device, is_free: false });
    }

    /// Closes devices that two successive checks found unused.
    pub(super) fn close_unused(&mut self) {
        self.0.retain_mut(|place| {
            let was_free = place.is_free;
            place.is_free =
                place.device.list_holders().is_empty() && place.device.open_channel_count() == 0;
            !(was_free && place.is_free)
        });
    }

    /// Whether all are closed.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Closes devices until none is left, or the time has passed.
    pub(super) fn close_within(&mut self, clock: &Clock, time: Span) {
        let until = clock.now().after(time);
        loop {
            self.close_unused();
            if self.0.is_empty() || clock.now() >= until {
                return;
            }
            tenmil_linux::named_thread::sleep(CHECK_INTERVAL);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use tenmil_base::{BlockDevice, IoChannel, Limits};
    use tenmil_block::{Bdev, BdevOptions, Claim};
    use tenmil_drivers::NullDevice;
    use tenmil_linux::{Clock, NamedThread};

    use super::ClosingDevices;

    /// Records whether it was dropped on the thread that created it.
    struct Shy {
        inner: NullDevice,
        home: std::thread::ThreadId,
        is_closed_at_home: Arc<AtomicBool>,
    }

    impl BlockDevice for Shy {
        fn limits(&self) -> Limits {
            self.inner.limits()
        }

        fn channel(&self) -> Result<Box<dyn IoChannel>, tenmil_base::Error> {
            self.inner.channel()
        }
    }

    impl Drop for Shy {
        fn drop(&mut self) {
            let is_home = std::thread::current().id() == self.home;
            self.is_closed_at_home.store(is_home, Ordering::SeqCst);
        }
    }

    #[test]
    fn removed_device_is_closed_on_the_thread_that_checks_it() {
        let is_closed_at_home = Arc::new(AtomicBool::new(false));
        let shy = Shy {
            inner: NullDevice::new(512, 8).unwrap(),
            home: std::thread::current().id(),
            is_closed_at_home: Arc::clone(&is_closed_at_home),
        };
        let options = BdevOptions::new(Clock::start(), 1);
        let device = Bdev::new("shy", Arc::new(shy), options).unwrap();
        let descriptor = device.open(Claim::WriteOnce, "test").unwrap();
        let channel = descriptor.channel().unwrap();
        drop(descriptor);
        let mut closing = ClosingDevices::default();
        closing.add_device(device);
        closing.close_unused();
        closing.close_unused();
        assert_eq!(closing.0.len(), 1, "a channel is open");
        NamedThread::spawn("elsewhere", None, move |_: &tenmil_linux::StopFlag| drop(channel))
            .unwrap()
            .join();
        assert!(!is_closed_at_home.load(Ordering::SeqCst));
        closing.close_unused();
        closing.close_unused();
        assert!(closing.0.is_empty());
        assert!(is_closed_at_home.load(Ordering::SeqCst));
    }
}
