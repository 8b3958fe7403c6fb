//! Volatile write cache of a controller: what a host finds, and its writes while it has switched it off.

use std::sync::{Arc, Mutex};

use tenmil_base::{
    BlockDevice, ChannelWakeup, CompletionBatch, Error, Instant, IoChannel, Operation, Request,
    RequestFlags, Segment,
};
use tenmil_drivers::RamDevice;
use tenmil_nvme_controller::controller::NamespaceConfig;
use tenmil_nvme_tcp::DataDirection;
use tenmil_wire::admin::SetFeatures;
use tenmil_wire::feature::Feature;
use tenmil_wire::identify::IdentifyController;
use tenmil_wire::{AdminOpcode, Command, IoOpcode, Status, TypedCommand};

use super::test_target::{BLOCKS, TestTarget, read_or_write_command};

/// RAM device that records of each write whether it was forced.
struct FuaRecordingDevice {
    ram: RamDevice,
    forced: Arc<Mutex<Vec<bool>>>,
}

struct FuaRecordingChannel {
    channel: Box<dyn IoChannel>,
    forced: Arc<Mutex<Vec<bool>>>,
}

impl BlockDevice for FuaRecordingDevice {
    fn limits(&self) -> tenmil_base::Limits {
        self.ram.limits()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        let (channel, forced) = (self.ram.channel()?, Arc::clone(&self.forced));
        Ok(Box::new(FuaRecordingChannel { channel, forced }))
    }
}

impl IoChannel for FuaRecordingChannel {
    fn limits(&self) -> &tenmil_base::Limits {
        self.channel.limits()
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let count = self.channel.submit(now, requests, segments);
        let writes = requests[..count].iter().filter(|it| it.operation == Operation::Write);
        let forced = writes.map(|request| request.flags.has(RequestFlags::FUA));
        self.forced.lock().unwrap().extend(forced);
        count
    }

    fn poll(&mut self, now: Instant, answers: &mut CompletionBatch) -> usize {
        self.channel.poll(now, answers)
    }
}

impl ChannelWakeup for FuaRecordingChannel {}

#[test]
fn write_has_fua_while_its_host_has_disabled_the_write_cache() {
    let (mut rig, subsystem) = TestTarget::with_subsystem();
    assert!(subsystem.remove_namespace(1));
    let forced = Arc::new(Mutex::new(Vec::new()));
    let ram = RamDevice::new(&rig.regions, 512, BLOCKS).unwrap();
    let medium = Arc::new(FuaRecordingDevice { ram, forced: Arc::clone(&forced) });
    let namespace = NamespaceConfig { nsid: Some(1), ..NamespaceConfig::new(medium) };
    subsystem.add_namespace(namespace).unwrap();
    let (admin, cntlid) = rig.connect_admin_queue();
    let io = rig.connect_io_queue(cntlid, 1);
    let identify = Command::new(AdminOpcode::Identify.code()).with_cdw10(1);
    let (_, page) = rig.execute_command(admin, &identify, DataDirection::ToHost(4096), &[]);
    let page = IdentifyController::from_bytes(page.first_chunk().unwrap());
    assert!(page.vwcp(), "memory is all cache to a host");
    let write = read_or_write_command(IoOpcode::Write.code(), 0, 8);
    for cache in [None, Some(0), Some(1)] {
        if let Some(cdw11) = cache {
            let fid = Feature::VolatileWriteCache.code();
            let set = SetFeatures { fid, cdw11, ..SetFeatures::default() }.to_command();
            let (completion, _) = rig.execute_command(admin, &set, DataDirection::None, &[]);
            assert_eq!(completion.status(), Status::SUCCESS);
        }
        let (completion, _) =
            rig.execute_command(io, &write, DataDirection::FromHost(4096), &[7; 4096]);
        assert_eq!(completion.status(), Status::SUCCESS);
    }
    assert_eq!(*forced.lock().unwrap(), [false, true, false]);
    rig.lines.clear();
    rig.assert_all_released();
}
