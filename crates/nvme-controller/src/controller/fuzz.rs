//! Fuzz target of the admin controller: arbitrary bytes act as a host, which must not cause a panic or a
//! violation of the interface.

use std::collections::VecDeque;
use std::sync::Arc;

use tenmil_base::{
    BlockDevice, ChannelWakeup, CompletionBatch, Durability, Error, Instant, IoChannel,
    IoCompletion, IoStatus, Limits, Operation, OperationSet, Request, Segment, Span,
};
use tenmil_wire::Command;

use super::transport_interface::{
    AdminDataTransfer, AdminOutcome, InvalidDoorbell, QueueCommandId,
};
use super::{
    AnaState, Controller, ControllerConfig, HostIdentity, NamespaceConfig, NamespacePool,
    Subsystem, SubsystemConfig,
};

/// Block device without storage that completes requests in the next poll.
struct NullDevice(Limits);

struct NullChannel {
    limits: Limits,
    waiting: VecDeque<u64>,
}

struct NullDevicePool;

/// Runs the actions encoded in `bytes`, 64 at a time. Most are commands, with the following bytes as
/// their data; the others are calls of a transport, or actions of another host.
///
/// # Panics
///
/// The controller has violated its interface: a finding.
pub fn fuzz_admin_commands(bytes: &[u8]) {
    let Some((subsystem, mut controllers)) = create_controllers() else { return };
    let mut now = Instant { ns: 0 };
    let mut rest = bytes;
    while let Some((chunk, following)) = rest.split_first_chunk::<64>() {
        rest = following;
        now = now.after(Span::from_us(100));
        let index = usize::from(chunk[63] & 1);
        let command = Command::from_bytes(chunk);
        // No admin command uses CDW3, so it selects the action.
        match command.cdw3() & 0x3f {
            0 => controllers[index].reset(now),
            1 => subsystem.emulate_power_cycle(),
            2 => subsystem.set_ana_state(1, command.nsid() & 3, AnaState::Inaccessible),
            3 => controllers[index].set_host(HostIdentity::Extended(command.mptr().into())),
            4 => controllers[index].record_invalid_doorbell(now, InvalidDoorbell::Value),
            5 => controllers[index].note_host_shutdown(),
            6 => {
                subsystem.remove_namespace(command.nsid() & 7);
            }
            7..=15 => run_reservation_command(&mut controllers[index], now, &command, following),
            _ => execute_admin_command(&mut controllers[index], now, &command, following),
        }
        for controller in &mut controllers {
            controller.poll(now);
            while controller.next_deferred_completion().is_some() {}
            while controller.next_async_event_dword0().is_some() {}
            while controller.next_transport_action().is_some() {}
        }
    }
}

fn execute_admin_command(
    controller: &mut Controller,
    now: Instant,
    command: &Command,
    following: &[u8],
) {
    let Ok(admin_data) = controller.command_data_length(command) else { return };
    let mut data = host_data(admin_data, following);
    let step = controller.execute(now, command, &mut data);
    match (step, admin_data) {
        (AdminOutcome::Done(end), AdminDataTransfer::ToHost(len_bytes))
            if end.status.is_success() =>
        {
            assert_eq!(data.len(), len_bytes as usize, "as much as was announced: {command:?}");
        }
        (AdminOutcome::Abort { .. }, _) => controller.note_abort_completed(),
        (AdminOutcome::CreateSubmissionQueue(_), _) => controller.note_queue_created(),
        _ => {}
    }
}

fn run_reservation_command(
    controller: &mut Controller,
    now: Instant,
    command: &Command,
    following: &[u8],
) {
    let Ok(admin_data) = controller.reservation_data_length(command) else { return };
    let mut data = host_data(admin_data, following);
    let from = QueueCommandId { queue: 1, ticket: 0 };
    let Some(end) = controller.execute_reservation_command(now, from, command, &mut data) else {
        return;
    };
    if let AdminDataTransfer::ToHost(len_bytes) = admin_data
        && end.status.is_success()
    {
        assert_eq!(data.len(), len_bytes as usize, "as much as was announced: {command:?}");
    }
}

/// Data from the host: the following bytes, padded with zeroes.
fn host_data(admin_data: AdminDataTransfer, following: &[u8]) -> Vec<u8> {
    let AdminDataTransfer::FromHost(len_bytes) = admin_data else { return Vec::new() };
    let mut data: Vec<u8> = following.iter().copied().take(len_bytes as usize).collect();
    data.resize(len_bytes as usize, 0);
    data
}

/// Creates two controllers of a subsystem with every optional feature.
fn create_controllers() -> Option<(Subsystem, [Controller; 2])> {
    let namespaces =
        (0..3).map(|_| NamespaceConfig::new(Arc::new(NullDevice(null_device_limits(512, 4096)))));
    let mut config = SubsystemConfig::new("FUZZ", namespaces.collect());
    config.nsid_max = 8;
    config.ana_groups = 2;
    config.pool = Some(Box::new(NullDevicePool));
    let subsystem = Subsystem::new(config).ok()?;
    let open = |cntlid| {
        let config = ControllerConfig { cntlid, ..ControllerConfig::default() };
        subsystem.open_controller(Instant { ns: 0 }, config).ok()
    };
    let controllers = [open(1)?, open(2)?];
    Some((subsystem, controllers))
}

fn null_device_limits(block_size: u32, block_count: u64) -> Limits {
    Limits {
        block_size,
        metadata_size: 0,
        block_count,
        request_blocks_max: 1024,
        segments_max: 1,
        optimal_boundary_blocks: 0,
        atomic_write_blocks: 1,
        depth_max: 8,
        durability: Durability::VolatileCache,
        operations: OperationSet::from_operations(&Operation::ALL),
    }
}

impl BlockDevice for NullDevice {
    fn limits(&self) -> Limits {
        self.0.clone()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        Ok(Box::new(NullChannel { limits: self.0.clone(), waiting: VecDeque::new() }))
    }
}

impl IoChannel for NullChannel {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, _now: Instant, requests: &[Request], _segments: &[Segment]) -> usize {
        let free_count = (self.limits.depth_max as usize).saturating_sub(self.waiting.len());
        self.waiting.extend(requests.iter().take(free_count).map(|request| request.token));
        requests.len().min(free_count)
    }

    fn poll(&mut self, _now: Instant, completions: &mut CompletionBatch) -> usize {
        let count = self.waiting.len().min(completions.remaining());
        for token in self.waiting.drain(..count) {
            completions.push(IoCompletion { token, status: IoStatus::SUCCESS, result: 0 });
        }
        count
    }
}

impl ChannelWakeup for NullChannel {}

impl NamespacePool for NullDevicePool {
    fn capacity_bytes(&self) -> u64 {
        64 << 20
    }

    fn block_sizes(&self) -> &[u32] {
        &[512, 4096]
    }

    fn create_block_device(
        &mut self,
        block_size: u32,
        block_count: u64,
    ) -> Result<Arc<dyn BlockDevice>, Error> {
        Ok(Arc::new(NullDevice(null_device_limits(block_size, block_count))))
    }
}
