//! Identify access to an attached controller.

use tenmil_base::{Dma, IoCompletion, IoStatus, Memory, Mmio};
use tenmil_wire::{Command, Status};

use super::{AttachedController, ControllerBus};
use crate::identify::{self, AdminAccessFn};
use tenmil_base::Error;

/// Runs `ask` with admin access to the controller.
pub(crate) fn with_controller<B: ControllerBus>(
    attached: AttachedController<B>,
    ask: AdminAccessFn<'_>,
) -> Result<(), Error> {
    ask(&mut AttachedAdmin { attached, submitted: 0 })
}

/// Admin access to an attached controller.
struct AttachedAdmin<B: ControllerBus> {
    attached: AttachedController<B>,
    /// Number of commands so far, which is the token of the last one.
    submitted: u64,
}

impl<B: ControllerBus> identify::AdminAccess for AttachedAdmin<B> {
    fn read32(&mut self, offset: usize) -> u32 {
        let offset = u32::try_from(offset).unwrap_or(u32::MAX);
        let read =
            self.attached.with_controller_locked(|controller| controller.mmio().read32(offset));
        read.unwrap_or(u32::MAX)
    }

    fn read64(&mut self, offset: usize) -> u64 {
        let offset = u32::try_from(offset).unwrap_or(u32::MAX);
        let read =
            self.attached.with_controller_locked(|controller| controller.mmio().read64(offset));
        read.unwrap_or(u64::MAX)
    }

    fn execute_admin(
        &mut self,
        command: Command,
        len_bytes: u32,
    ) -> Result<identify::AdminResult, Error> {
        let dma = self.attached.queue_memory.dma().clone();
        let data = match len_bytes {
            0 => None,
            _ => Some(dma.allocate(len_bytes).ok_or_else(|| {
                Error::environment(format!(
                    "allocate {len_bytes} bytes for a response: none are left"
                ))
            })?),
        };
        self.submitted += 1;
        let (token, now) = (self.submitted, self.attached.clock.now());
        let sent = self.attached.with_controller_locked(|controller| {
            controller.submit_admin(now, token, command, data)
        })?;
        sent.map_err(|refusal| Error::remote(format!("query the controller: {refusal}")))?;
        let IoCompletion { status: IoStatus(status), result, .. } =
            self.attached.await_completion(token)?;
        let mut bytes = vec![0; len_bytes as usize];
        if let Some(data) = data {
            let loaded = dma.load(data, &mut bytes);
            dma.release(data);
            loaded.map_err(|stray| Error::environment(format!("read a response: {stray:?}")))?;
        }
        Ok(identify::AdminResult { status: Status(status), result, bytes })
    }
}
