//! Asking a remote SSD what it is.

use base::{Dma, Instant, Memory, Mmio, Outcome};
use dma::Regions;
use host::Clock;
use wire::{Command, Status};

use super::attached::{Attached, Pulse};
use super::name::TcpName;
use crate::Refused;
use crate::identify::{self, Ask};

/// Calls the SSD that `name` names, and lets `ask` ask it things.
pub(crate) fn with_controller(name: &TcpName, ask: Ask<'_>) -> Result<(), Refused> {
    let mut ssd = AskedRemote::call(name)?;
    ask(&mut ssd)
}

/// The controller of a remote SSD.
pub(super) struct AskedRemote {
    attached: Attached,
    /// How many commands there have been: the token of the last one.
    asked: u64,
    address: String,
}

impl AskedRemote {
    /// Calls the first path that leads there.
    pub(super) fn call(name: &TcpName) -> Result<Self, Refused> {
        let mut refused = None;
        for address in name.addresses() {
            let name = TcpName { address: address.to_owned(), others: Vec::new(), ..name.clone() };
            match Self::call_one(&name) {
                Ok(asked) => return Ok(asked),
                Err(problem) => drop(refused.get_or_insert(problem)),
            }
        }
        Err(refused.unwrap_or_else(|| Refused::caller("call nobody: no address".to_owned())))
    }

    fn call_one(name: &TcpName) -> Result<Self, Refused> {
        let name = TcpName { queues: 1, depth: MEMORY_DEPTH, ..name.clone() };
        let regions = Regions::new(4);
        let attached = Attached::call(&name, &regions, Clock::start())?;
        Ok(Self { attached, asked: 0, address: name.address })
    }

    /// Who was called.
    pub(super) fn address(&self) -> &str {
        &self.address
    }

    /// What time it is for it.
    pub(super) fn now(&self) -> Instant {
        self.attached.clock.now()
    }

    /// What has happened to it so far. An error if it was given up.
    pub(super) fn pulse(&self) -> Result<Pulse, Refused> {
        self.attached.pulse()
    }

    /// Whether it says when its discovery log page has changed.
    pub(super) fn tells_of_changes(&self) -> bool {
        self.attached.with(|remote| {
            let identity = remote.controller().identity();
            identity.is_some_and(|identity| identity.page.discovery_notices())
        })
    }
}

/// No queue is made; its share of the memory takes the answers.
const MEMORY_DEPTH: u32 = 511;

impl identify::Controller for AskedRemote {
    fn read32(&mut self, offset: usize) -> u32 {
        let offset = u32::try_from(offset).unwrap_or(u32::MAX);
        self.attached.with(|remote| remote.controller().mmio().read32(offset))
    }

    fn read64(&mut self, offset: usize) -> u64 {
        let offset = u32::try_from(offset).unwrap_or(u32::MAX);
        self.attached.with(|remote| remote.controller().mmio().read64(offset))
    }

    fn admin(&mut self, command: Command, len_bytes: u32) -> Result<identify::Answer, Refused> {
        let reach = self.attached.with(|remote| remote.reach().clone());
        let data = match len_bytes {
            0 => None,
            _ => Some(reach.allocate(len_bytes).ok_or_else(|| {
                Refused::machine(format!("allocate {len_bytes} bytes for an answer: none are left"))
            })?),
        };
        self.asked += 1;
        let (token, now) = (self.asked, self.attached.clock.now());
        let sent = self
            .attached
            .with(|remote| remote.controller().submit_admin(now, token, command, data));
        sent.map_err(|refusal| Refused::peer(format!("ask tcp://{}: {refusal}", self.address)))?;
        let base::Answer { outcome: Outcome(status), result, .. } =
            self.attached.await_answer(token)?;
        let mut bytes = vec![0; len_bytes as usize];
        if let Some(data) = data {
            let loaded = reach.load(data, &mut bytes);
            reach.release(data);
            loaded.map_err(|stray| Refused::machine(format!("read an answer: {stray:?}")))?;
        }
        Ok(identify::Answer { status: Status(status), result, bytes })
    }
}
