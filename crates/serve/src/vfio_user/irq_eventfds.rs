//! Interrupt vectors of a controller as eventfds of its client.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::Interrupts;
use tenmil_linux::RemoteEventFd;
use tenmil_vfio_user::{IrqAction, IrqSelection};

/// Interrupt target of each vector. Clones share the state.
#[derive(Clone, Debug)]
pub(super) struct IrqEventFds {
    irqs: Arc<Mutex<Vec<VectorEventFd>>>,
}

/// Target of a vector.
#[derive(Debug, Default)]
struct VectorEventFd {
    line: Option<RemoteEventFd>,
    is_masked: bool,
    /// Whether it was raised while masked.
    is_pending: bool,
}

impl IrqEventFds {
    pub(super) fn new(vectors: u16) -> Self {
        let irqs = (0..vectors).map(|_| VectorEventFd::default()).collect();
        Self { irqs: Arc::new(Mutex::new(irqs)) }
    }

    fn lock_vectors(&self) -> MutexGuard<'_, Vec<VectorEventFd>> {
        self.irqs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies DEVICE_SET_IRQS to the vectors from `start` on.
    pub(super) fn set_irqs(
        &self,
        start: u32,
        count: u32,
        action: IrqAction,
        data: IrqSelection<RemoteEventFd>,
    ) {
        let mut irqs = self.lock_vectors();
        let all = irqs.len();
        let (start, count) = (start as usize, count as usize);
        // No vectors from the first on disables all of them.
        let is_all =
            count == 0 && matches!(data, IrqSelection::All) && action == IrqAction::Trigger;
        let range = if is_all { 0..all } else { start.min(all)..(start + count).min(all) };
        let chosen = &mut irqs[range];
        match data {
            IrqSelection::All if is_all => {
                chosen.iter_mut().for_each(|way| *way = VectorEventFd::default())
            }
            IrqSelection::All => chosen.iter_mut().for_each(|way| way.apply_action(action)),
            IrqSelection::Some(which) => {
                let picked = chosen.iter_mut().zip(which).filter(|(_, is_picked)| *is_picked);
                picked.for_each(|(way, _)| way.apply_action(action));
            }
            // Eventfds for mask actions would be notified of nothing, so they are dropped.
            IrqSelection::Files(_) if action != IrqAction::Trigger => {}
            IrqSelection::Files(files) => {
                let mut files = files.into_iter();
                chosen.iter_mut().for_each(|way| way.line = files.next());
            }
        }
    }

    /// Clears all vectors, because the client has disconnected.
    pub(super) fn clear_all(&self) {
        self.lock_vectors().iter_mut().for_each(|way| *way = VectorEventFd::default());
    }
}

impl VectorEventFd {
    fn apply_action(&mut self, action: IrqAction) {
        match action {
            IrqAction::Mask => self.is_masked = true,
            IrqAction::Unmask => {
                self.is_masked = false;
                if std::mem::take(&mut self.is_pending) {
                    self.signal_eventfd();
                }
            }
            IrqAction::Trigger => self.signal_eventfd(),
        }
    }

    fn signal_eventfd(&mut self) {
        match &self.line {
            Some(_) if self.is_masked => self.is_pending = true,
            Some(line) => line.signal(),
            None => {}
        }
    }
}

impl Interrupts for IrqEventFds {
    fn raise(&mut self, vector: u16) {
        if let Some(way) = self.lock_vectors().get_mut(usize::from(vector)) {
            way.signal_eventfd();
        }
    }
}
