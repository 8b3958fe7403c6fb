//! A vector of a function, to sleep on.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Weak};

use base::Vector;
use host::EventVectors;
use vfio::Function;

/// A vector that signals an event descriptor while somebody sleeps on it.
///
/// Under MSI-X nobody may mask by INTMS (Base 2.1 §3.1.4.3), so a vector is quietened by taking its
/// descriptor away, which is a call to the kernel. While its host polls, the descriptor therefore
/// stays for a while: only a vector that has been polled past for long is taken off.
pub(super) struct FunctionVector {
    event: EventVectors,
    /// The kernel may want it back while somebody has the vector.
    function: Weak<Function>,
    number: u16,
    /// Whether the descriptor is there.
    is_attached: bool,
    /// How many times in a row the vector was masked and signalled meanwhile.
    vain: u32,
}

/// Signals that nobody waited for until the descriptor is taken away.
const VAIN_MAX: u32 = 16;

impl FunctionVector {
    pub(super) fn new(function: &Arc<Function>, number: u16) -> Result<Self, String> {
        let event = EventVectors::new(1).map_err(|error| error.to_string())?;
        let function = Arc::downgrade(function);
        Ok(Self { event, function, number, is_attached: false, vain: 0 })
    }

    fn signal(&self, is_wanted: bool) -> bool {
        let event = self.event.descriptor(0).filter(|_| is_wanted);
        let function = self.function.upgrade();
        function.is_some_and(|function| function.signal(self.number.into(), event).is_ok())
    }

    /// What is slept on, to be raised once when the controller is lost.
    pub(super) fn event(&self) -> EventVectors {
        self.event.clone()
    }
}

impl Vector for FunctionVector {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.event.descriptor(0).expect("it was made with one")
    }

    fn unmask(&mut self) -> bool {
        self.event.clear(0);
        if !self.is_attached {
            self.is_attached = self.signal(true);
        }
        self.is_attached
    }

    fn mask(&mut self) {
        if !self.is_attached {
            return;
        }
        self.vain = if self.event.clear(0) { self.vain + 1 } else { 0 };
        if self.vain >= VAIN_MAX {
            self.vain = 0;
            self.is_attached = !self.signal(false);
        }
    }
}
