//! Interrupt vector of a PCI function.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Weak};
use tenmil_base::Error;

use tenmil_base::InterruptVector;
use tenmil_linux::EventFdVectors;
use tenmil_pci::VfioFunction;

/// MSI-X vector that signals an event descriptor while a thread sleeps on it.
///
/// The host must not mask by INTMS under MSI-X (Base 2.1 §3.1.4.3), so a vector is masked by
/// detaching its descriptor, which is a system call. While the host polls, the descriptor therefore
/// stays attached at first; it is detached after several interrupts in a row that no thread waited
/// for.
pub(super) struct PciInterruptVector {
    event: EventFdVectors,
    /// Weak, since the kernel may request the function back while the vector is in use.
    function: Weak<VfioFunction>,
    number: u16,
    /// Whether the descriptor is attached.
    is_attached: bool,
    /// Number of consecutive times the vector was signaled while it was masked.
    vain: u32,
}

/// Unnecessary interrupts before the descriptor is detached.
const VAIN_MAX: u32 = 16;

impl PciInterruptVector {
    pub(super) fn new(function: &Arc<VfioFunction>, number: u16) -> Result<Self, Error> {
        let event = EventFdVectors::new(1).map_err(Error::environment)?;
        let function = Arc::downgrade(function);
        Ok(Self { event, function, number, is_attached: false, vain: 0 })
    }

    fn set_signaling(&self, is_wanted: bool) -> bool {
        let event = self.event.descriptor(0).filter(|_| is_wanted);
        let function = self.function.upgrade();
        function.is_some_and(|function| function.set_irq_eventfd(self.number.into(), event).is_ok())
    }

    /// Event to sleep on. Signaled once when the controller is lost.
    pub(super) fn event(&self) -> EventFdVectors {
        self.event.clone()
    }
}

impl InterruptVector for PciInterruptVector {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.event.descriptor(0).expect("it was made with one")
    }

    fn unmask(&mut self) -> bool {
        self.event.clear_signals(0);
        if !self.is_attached {
            self.is_attached = self.set_signaling(true);
        }
        self.is_attached
    }

    fn mask(&mut self) {
        if !self.is_attached {
            return;
        }
        self.vain = if self.event.clear_signals(0) { self.vain + 1 } else { 0 };
        if self.vain >= VAIN_MAX {
            self.vain = 0;
            self.is_attached = !self.set_signaling(false);
        }
    }
}
