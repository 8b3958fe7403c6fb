//! A disk that answers, for what counts calls and instructions: the target that offers it, and the
//! requests that go to it.

use std::collections::BTreeMap;
use std::sync::Arc;

use tenmil_base::{BlockDevice, Operation, Request, RequestFlags};
use tenmil_dma::RegionTable;
use tenmil_drivers::NullDevice;
use tenmil_nvme_controller::controller::{NamespaceConfig, Subsystem, SubsystemConfig};
use tenmil_serve::tcp::{
    AllowedHosts, ControllerModel, Port, Service, ServiceLimits, SubsystemExportConfig,
    SubsystemSecurity,
};

/// Of a request.
pub(crate) const BYTES: u32 = 4096;
/// Of the subsystem.
pub(crate) const NQN: &str = "nqn.2024-01.example:disk";

/// Request `number`, with memory of its own.
pub(crate) fn request(number: u64, operation: Operation) -> Request {
    Request {
        token: number,
        lba: number * 8,
        operand: 0,
        segment_first: u32::try_from(number).unwrap(),
        blocks: BYTES / 512,
        segment_count: 1,
        metadata_count: 0,
        operation,
        flags: RequestFlags::NONE,
    }
}

/// A target with the disk.
pub(crate) fn null_disk_service(regions: &RegionTable, limits: ServiceLimits) -> Service {
    service_of_device(Arc::new(NullDevice::new(512, 1 << 20).unwrap()), regions, limits)
}

/// A target with another one.
pub(crate) fn service_of_device(
    medium: Arc<dyn BlockDevice>,
    regions: &RegionTable,
    limits: ServiceLimits,
) -> Service {
    let service = Service::new(regions, limits).unwrap();
    let config = SubsystemConfig {
        nqn: NQN.to_owned(),
        ..SubsystemConfig::new("1", vec![NamespaceConfig::new(medium)])
    };
    let plan = SubsystemExportConfig {
        subsystem: Subsystem::new(config).unwrap(),
        nqn: NQN.to_owned(),
        hosts: AllowedHosts::Any,
        ports: BTreeMap::from([(1, Vec::new())]),
        model: ControllerModel::Dynamic,
        masks: BTreeMap::new(),
        security: SubsystemSecurity::default(),
    };
    service.add_port(1, Port { address: None, ..Port::default() });
    service.add_subsystem(plan).unwrap();
    service
}
