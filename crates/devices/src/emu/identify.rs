//! Identify access to an emulated SSD.

use tenmil_base::{IoCompletion, IoStatus, Memory, Mmio, Span};
use tenmil_linux::Clock;
use tenmil_nvme_host::Event;
use tenmil_wire::{Command, Status};

use super::{EmuPlan, EmulatedSsds, TIME_LIMIT};
use crate::EmuSpec;
use crate::fast_path_switches::FastPathSwitches;
use crate::identify::{self, AdminAccessFn};
use tenmil_base::Error;

/// Starts the SSD of `spec`, runs `ask` with admin access to it, and shuts it down.
pub fn with_controller(spec: &EmuSpec, ask: AdminAccessFn<'_>) -> Result<(), Error> {
    let clock = Clock::start();
    let plan = EmuPlan {
        specs: std::slice::from_ref(spec),
        queue_pairs: spec.queues,
        depth: 1,
        buffer_bytes: u64::from(DATA_BYTES_MAX),
        techniques: &FastPathSwitches::default(),
        device_cores: &[None],
        yields: true,
        interrupts: false,
        fills: false,
        seed: 0,
    };
    let mut ssd =
        EmulatedAdmin { emulated: EmulatedSsds::start(&plan, &clock)?, clock, submitted: 0 };
    let result = ask(&mut ssd);
    ssd.emulated.shut_down(&clock);
    result
}

/// Admin access to an emulated SSD.
struct EmulatedAdmin {
    emulated: EmulatedSsds,
    clock: Clock,
    /// Number of commands so far, which is the token of the last one.
    submitted: u64,
}

/// Maximum length of admin data.
const DATA_BYTES_MAX: u32 = 1 << 20;

impl identify::AdminAccess for EmulatedAdmin {
    fn read32(&mut self, offset: usize) -> u32 {
        let offset = u32::try_from(offset).unwrap_or(u32::MAX);
        self.emulated.controller(0).mmio().read32(offset)
    }

    fn read64(&mut self, offset: usize) -> u64 {
        let offset = u32::try_from(offset).unwrap_or(u32::MAX);
        self.emulated.controller(0).mmio().read64(offset)
    }

    fn execute_admin(
        &mut self,
        command: Command,
        len_bytes: u32,
    ) -> Result<identify::AdminResult, Error> {
        let pool = self.emulated.controller(0).dma().clone();
        let data = match len_bytes {
            0 => None,
            _ => Some(tenmil_base::Dma::allocate(&pool, len_bytes).ok_or_else(|| {
                Error::environment(format!(
                    "allocate {len_bytes} bytes for a response: none are left"
                ))
            })?),
        };
        self.submitted += 1;
        let (token, now) = (self.submitted, self.clock.now());
        let controller = self.emulated.controller(0);
        let sent = controller.submit_admin(now, token, command, data);
        sent.map_err(|refusal| Error::remote(format!("query the controller: {refusal}")))?;
        let IoCompletion { status: IoStatus(status), result, .. } = self.await_completion(token)?;
        let mut bytes = vec![0; len_bytes as usize];
        if let Some(data) = data {
            let loaded = pool.load(data, &mut bytes);
            tenmil_base::Dma::release(&pool, data);
            loaded.map_err(|stray| Error::environment(format!("read a response: {stray:?}")))?;
        }
        Ok(identify::AdminResult { status: Status(status), result, bytes })
    }
}

impl EmulatedAdmin {
    fn await_completion(&mut self, token: u64) -> Result<IoCompletion, Error> {
        let end = self.clock.now().after(TIME_LIMIT);
        loop {
            let now = self.clock.now();
            match self.emulated.controller(0).poll(now) {
                Some(Event::AdminCompleted(completion)) if completion.token == token => {
                    return Ok(completion);
                }
                Some(Event::Dead(error)) => {
                    return Err(Error::remote(format!("query the controller: {error}")));
                }
                Some(_) => {}
                None if now >= end => {
                    let waited: Span = TIME_LIMIT;
                    let text = format!("query the controller: no response within {waited}");
                    return Err(Error::remote(text));
                }
                None => tenmil_linux::named_thread::yield_cpu(),
            }
        }
    }
}
