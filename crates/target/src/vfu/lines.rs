//! The vectors of a controller, as event descriptors that its client has sent.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::Interrupts;
use host::Line;
use vfu::{IrqAction, IrqData};

/// A line for each vector, or none. Every clone is the same.
#[derive(Clone, Debug)]
pub(super) struct Lines {
    lines: Arc<Mutex<Vec<Way>>>,
}

/// Where the signals of a vector go.
#[derive(Debug, Default)]
struct Way {
    line: Option<Line>,
    is_masked: bool,
    /// It was raised while it was masked.
    is_pending: bool,
}

impl Lines {
    pub(super) fn new(vectors: u16) -> Self {
        let lines = (0..vectors).map(|_| Way::default()).collect();
        Self { lines: Arc::new(Mutex::new(lines)) }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Way>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does what the client wants with the vectors from `start` on.
    pub(super) fn set(&self, start: u32, count: u32, action: IrqAction, data: IrqData<Line>) {
        let mut lines = self.lock();
        let all = lines.len();
        let (start, count) = (start as usize, count as usize);
        // Of none, from the first on: all.
        let is_all = count == 0 && matches!(data, IrqData::All) && action == IrqAction::Trigger;
        let range = if is_all { 0..all } else { start.min(all)..(start + count).min(all) };
        let chosen = &mut lines[range];
        match data {
            IrqData::All if is_all => chosen.iter_mut().for_each(|way| *way = Way::default()),
            IrqData::All => chosen.iter_mut().for_each(|way| way.act(action)),
            IrqData::Some(which) => {
                let picked = chosen.iter_mut().zip(which).filter(|(_, is_picked)| *is_picked);
                picked.for_each(|(way, _)| way.act(action));
            }
            // Who sends descriptors for masking wants to hear of it; there is nothing to be told.
            IrqData::Files(_) if action != IrqAction::Trigger => {}
            IrqData::Files(files) => {
                let mut files = files.into_iter();
                chosen.iter_mut().for_each(|way| way.line = files.next());
            }
        }
    }

    /// The client has gone.
    pub(super) fn clear(&self) {
        self.lock().iter_mut().for_each(|way| *way = Way::default());
    }
}

impl Way {
    fn act(&mut self, action: IrqAction) {
        match action {
            IrqAction::Mask => self.is_masked = true,
            IrqAction::Unmask => {
                self.is_masked = false;
                if std::mem::take(&mut self.is_pending) {
                    self.signal();
                }
            }
            IrqAction::Trigger => self.signal(),
        }
    }

    fn signal(&mut self) {
        match &self.line {
            Some(_) if self.is_masked => self.is_pending = true,
            Some(line) => line.signal(),
            None => {}
        }
    }
}

impl Interrupts for Lines {
    fn raise(&mut self, vector: u16) {
        if let Some(way) = self.lock().get_mut(usize::from(vector)) {
            way.signal();
        }
    }
}
