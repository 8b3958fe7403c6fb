//! Asking a controller what it is.

use base::{Answer, Dma, Memory, Mmio, Outcome};
use wire::{Command, Status};

use super::{Attached, Bus};
use crate::Refused;
use crate::identify::{self, Ask};

/// Lets `ask` ask the controller things.
pub(crate) fn with_controller<B: Bus>(attached: Attached<B>, ask: Ask<'_>) -> Result<(), Refused> {
    ask(&mut Asked { attached, asked: 0 })
}

/// The controller, as `identify` sees it.
struct Asked<B: Bus> {
    attached: Attached<B>,
    /// How many commands there have been: the token of the last one.
    asked: u64,
}

impl<B: Bus> identify::Controller for Asked<B> {
    fn read32(&mut self, offset: usize) -> u32 {
        let offset = u32::try_from(offset).unwrap_or(u32::MAX);
        let read = self.attached.with(|controller| controller.mmio().read32(offset));
        read.unwrap_or(u32::MAX)
    }

    fn read64(&mut self, offset: usize) -> u64 {
        let offset = u32::try_from(offset).unwrap_or(u32::MAX);
        let read = self.attached.with(|controller| controller.mmio().read64(offset));
        read.unwrap_or(u64::MAX)
    }

    fn admin(&mut self, command: Command, len_bytes: u32) -> Result<identify::Answer, Refused> {
        let reach = self.attached.home.reach().clone();
        let data = match len_bytes {
            0 => None,
            _ => Some(reach.allocate(len_bytes).ok_or_else(|| {
                Refused::machine(format!("allocate {len_bytes} bytes for an answer: none are left"))
            })?),
        };
        self.asked += 1;
        let (token, now) = (self.asked, self.attached.clock.now());
        let sent =
            self.attached.with(|controller| controller.submit_admin(now, token, command, data))?;
        sent.map_err(|refusal| Refused::peer(format!("ask the controller: {refusal}")))?;
        let Answer { outcome: Outcome(status), result, .. } = self.attached.await_answer(token)?;
        let mut bytes = vec![0; len_bytes as usize];
        if let Some(data) = data {
            let loaded = reach.load(data, &mut bytes);
            reach.release(data);
            loaded.map_err(|stray| Refused::machine(format!("read an answer: {stray:?}")))?;
        }
        Ok(identify::Answer { status: Status(status), result, bytes })
    }
}
