//! A fuzz target: any bytes are a host, and no host can make a controller panic or break its word.

use std::collections::VecDeque;
use std::sync::Arc;

use base::{
    Answer, Answers, Backend, Durability, Instant, Limits, Medium, Operation, Outcome, Request,
    Segment, Span, Support,
};
use wire::Command;

use super::contract::{AdminData, AdminStep, InvalidDoorbell, Origin};
use super::{
    AnaState, Controller, ControllerConfig, HostIdentity, MediumPool, NamespaceConfig, Subsystem,
    SubsystemConfig,
};

/// A medium that holds nothing and answers a turn later.
struct Nowhere(Limits);

struct Channel {
    limits: Limits,
    waiting: VecDeque<u64>,
}

struct Pool;

/// What a host does is read from `bytes`, 64 at a time: most are commands, with what follows as
/// their data; some are what a front end tells, or another host does.
///
/// # Panics
///
/// If the controller breaks its word: that is a finding.
pub fn fuzz(bytes: &[u8]) {
    let Some((subsystem, mut controllers)) = world() else { return };
    let mut now = Instant { ns: 0 };
    let mut rest = bytes;
    while let Some((chunk, behind)) = rest.split_first_chunk::<64>() {
        rest = behind;
        now = now.after(Span::from_us(100));
        let index = usize::from(chunk[63] & 1);
        let command = Command::from_bytes(chunk);
        // CDW3 is used by no admin command, so it chooses what happens.
        match command.cdw3() & 0x3f {
            0 => controllers[index].reset(now),
            1 => subsystem.power_cycled(),
            2 => subsystem.set_ana_state(1, command.nsid() & 3, AnaState::Inaccessible),
            3 => controllers[index].set_host(HostIdentity::Extended(command.mptr().into())),
            4 => controllers[index].invalid_doorbell(now, InvalidDoorbell::Value),
            5 => controllers[index].shutdown(),
            6 => {
                subsystem.remove_namespace(command.nsid() & 7);
            }
            7..=15 => reserve(&mut controllers[index], now, &command, behind),
            _ => execute(&mut controllers[index], now, &command, behind),
        }
        for controller in &mut controllers {
            controller.turn(now);
            while controller.next_done().is_some() {}
            while controller.next_event().is_some() {}
            while controller.next_signal().is_some() {}
        }
    }
}

fn execute(controller: &mut Controller, now: Instant, command: &Command, behind: &[u8]) {
    let Ok(moves) = controller.data(command) else { return };
    let mut data = sent(moves, behind);
    let step = controller.execute(now, command, &mut data);
    match (step, moves) {
        (AdminStep::Done(end), AdminData::ToHost(len_bytes)) if end.status.is_success() => {
            assert_eq!(data.len(), len_bytes as usize, "as much as was announced: {command:?}");
        }
        (AdminStep::Abort { .. }, _) => controller.abort_ended(),
        (AdminStep::CreateSubmissionQueue(_), _) => controller.queue_created(),
        _ => {}
    }
}

fn reserve(controller: &mut Controller, now: Instant, command: &Command, behind: &[u8]) {
    let Ok(moves) = controller.reservation_data(command) else { return };
    let mut data = sent(moves, behind);
    let from = Origin { queue: 1, ticket: 0 };
    let Some(end) = controller.reservation(now, from, command, &mut data) else { return };
    if let AdminData::ToHost(len_bytes) = moves
        && end.status.is_success()
    {
        assert_eq!(data.len(), len_bytes as usize, "as much as was announced: {command:?}");
    }
}

/// What the host sends: the bytes that follow, then zeroes.
fn sent(moves: AdminData, behind: &[u8]) -> Vec<u8> {
    let AdminData::FromHost(len_bytes) = moves else { return Vec::new() };
    let mut data: Vec<u8> = behind.iter().copied().take(len_bytes as usize).collect();
    data.resize(len_bytes as usize, 0);
    data
}

/// Two controllers of a subsystem in which everything is offered.
fn world() -> Option<(Subsystem, [Controller; 2])> {
    let namespaces = (0..3).map(|_| NamespaceConfig::new(Arc::new(Nowhere(limits(512, 4096)))));
    let mut config = SubsystemConfig::new("FUZZ", namespaces.collect());
    config.nsid_max = 8;
    config.ana_groups = 2;
    config.pool = Some(Box::new(Pool));
    let subsystem = Subsystem::new(config).ok()?;
    let open = |cntlid| {
        let config = ControllerConfig { cntlid, ..ControllerConfig::default() };
        subsystem.controller(Instant { ns: 0 }, config).ok()
    };
    let controllers = [open(1)?, open(2)?];
    Some((subsystem, controllers))
}

fn limits(block_size: u32, block_count: u64) -> Limits {
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
        support: Support::of(&Operation::ALL),
    }
}

impl Medium for Nowhere {
    fn limits(&self) -> Limits {
        self.0.clone()
    }

    fn channel(&self) -> Result<Box<dyn Backend>, String> {
        Ok(Box::new(Channel { limits: self.0.clone(), waiting: VecDeque::new() }))
    }
}

impl Backend for Channel {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, _now: Instant, requests: &[Request], _segments: &[Segment]) -> usize {
        let room = (self.limits.depth_max as usize).saturating_sub(self.waiting.len());
        self.waiting.extend(requests.iter().take(room).map(|request| request.token));
        requests.len().min(room)
    }

    fn poll(&mut self, _now: Instant, answers: &mut Answers) -> usize {
        let count = self.waiting.len().min(answers.room());
        for token in self.waiting.drain(..count) {
            answers.push(Answer { token, outcome: Outcome::SUCCESS, result: 0 });
        }
        count
    }
}

impl MediumPool for Pool {
    fn capacity_bytes(&self) -> u64 {
        64 << 20
    }

    fn block_sizes(&self) -> &[u32] {
        &[512, 4096]
    }

    fn create(&mut self, block_size: u32, block_count: u64) -> Result<Arc<dyn Medium>, String> {
        Ok(Arc::new(Nowhere(limits(block_size, block_count))))
    }
}
