//! Identify access to a remote controller.

use tenmil_base::{Dma, Instant, IoStatus, Memory, Mmio};
use tenmil_dma::RegionTable;
use tenmil_linux::Clock;
use tenmil_wire::{Command, Status};

use super::fabrics_controller::{AttachedFabricsController, ConnectionEventCounts};
use super::tcp_uri::TcpUri;
use crate::identify::{self, AdminAccessFn};
use tenmil_base::Error;

/// Connects to the controller that `name` names and runs `ask` with admin access to it.
pub fn with_controller(name: &TcpUri, ask: AdminAccessFn<'_>) -> Result<(), Error> {
    let mut ssd = RemoteAdmin::connect(name)?;
    ask(&mut ssd)
}

/// Admin access to a remote controller.
pub(super) struct RemoteAdmin {
    attached: AttachedFabricsController,
    /// Number of commands so far, which is the token of the last one.
    submitted: u64,
    address: String,
}

impl RemoteAdmin {
    /// Connects over the first path that works.
    pub(super) fn connect(name: &TcpUri) -> Result<Self, Error> {
        let mut refused = None;
        for address in name.addresses() {
            let name = TcpUri { address: address.to_owned(), others: Vec::new(), ..name.clone() };
            match Self::connect_path(&name) {
                Ok(submitted) => return Ok(submitted),
                Err(problem) => drop(refused.get_or_insert(problem)),
            }
        }
        Err(refused.unwrap_or_else(|| Error::usage("connect: no address".to_owned())))
    }

    fn connect_path(name: &TcpUri) -> Result<Self, Error> {
        let name = TcpUri { queues: 1, depth: MEMORY_DEPTH, ..name.clone() };
        let regions = RegionTable::new(4);
        let attached = AttachedFabricsController::connect(&name, &regions, Clock::start())?;
        Ok(Self { attached, submitted: 0, address: name.address })
    }

    /// Address of the connected path.
    pub(super) fn address(&self) -> &str {
        &self.address
    }

    /// Current time of the clock that the controller uses.
    pub(super) fn now(&self) -> Instant {
        self.attached.clock.now()
    }

    /// Connection events so far. An error if the controller is lost.
    pub(super) fn connection_event_counts(&self) -> Result<ConnectionEventCounts, Error> {
        self.attached.connection_event_counts()
    }

    /// Whether the controller reports Discovery Log Page Change events.
    pub(super) fn notifies_changes(&self) -> bool {
        self.attached.with_controller_locked(|remote| {
            let identity = remote.controller().identity();
            identity.is_some_and(|identity| identity.page.discovery_notices())
        })
    }
}

/// Queue depth that sizes the memory. No I/O queue is created; its share holds admin data.
const MEMORY_DEPTH: u32 = 511;

impl identify::AdminAccess for RemoteAdmin {
    fn read32(&mut self, offset: usize) -> u32 {
        let offset = u32::try_from(offset).unwrap_or(u32::MAX);
        self.attached.with_controller_locked(|remote| remote.controller().mmio().read32(offset))
    }

    fn read64(&mut self, offset: usize) -> u64 {
        let offset = u32::try_from(offset).unwrap_or(u32::MAX);
        self.attached.with_controller_locked(|remote| remote.controller().mmio().read64(offset))
    }

    fn execute_admin(
        &mut self,
        command: Command,
        len_bytes: u32,
    ) -> Result<identify::AdminResult, Error> {
        let reach = self.attached.with_controller_locked(|remote| remote.dma().clone());
        let data = match len_bytes {
            0 => None,
            _ => Some(reach.allocate(len_bytes).ok_or_else(|| {
                Error::environment(format!(
                    "allocate {len_bytes} bytes for a response: none are left"
                ))
            })?),
        };
        self.submitted += 1;
        let (token, now) = (self.submitted, self.attached.clock.now());
        let sent = self.attached.with_controller_locked(|remote| {
            remote.controller().submit_admin(now, token, command, data)
        });
        sent.map_err(|refusal| Error::remote(format!("ask tcp://{}: {refusal}", self.address)))?;
        let tenmil_base::IoCompletion { status: IoStatus(status), result, .. } =
            self.attached.await_completion(token)?;
        let mut bytes = vec![0; len_bytes as usize];
        if let Some(data) = data {
            let loaded = reach.load(data, &mut bytes);
            reach.release(data);
            loaded.map_err(|stray| Error::environment(format!("read a response: {stray:?}")))?;
        }
        Ok(identify::AdminResult { status: Status(status), result, bytes })
    }
}
