//! Parts of a subsystem, and their visibility.

use std::sync::Arc;

use tenmil_base::{BlockDevice, Durability, Error, Instant, Span};

use super::fixture::{ControllerFixture, EVERYTHING, FakeBlockDevice};
use crate::controller::{
    ControllerConfig, HostIdentity, NamespaceConfig, Subsystem, SubsystemConfig, TransportModel,
};

fn namespace_config() -> NamespaceConfig {
    NamespaceConfig::new(Arc::new(FakeBlockDevice::new()))
}

fn config_error(change: impl FnOnce(&mut SubsystemConfig)) -> String {
    let mut config = SubsystemConfig::new("T1", vec![namespace_config()]);
    change(&mut config);
    Subsystem::new(config).err().map_or_else(String::new, |error| error.text)
}

fn nsids(controller: &crate::controller::Controller) -> Vec<u32> {
    controller.namespaces().reader().get().iter().map(|namespace| namespace.nsid).collect()
}

#[test]
fn invalid_subsystem_config_is_rejected_with_the_accepted_values() {
    let cases = [
        config_error(|config| config.serial = "x".repeat(21)),
        config_error(|config| config.serial = String::new()),
        config_error(|config| config.model = "ß".to_owned()),
        config_error(|config| config.firmware = "123456789".to_owned()),
        config_error(|config| config.nqn = "x".repeat(224)),
        config_error(|config| config.nsid_max = 0),
        config_error(|config| config.namespaces[0].nsid = Some(1025)),
        config_error(|config| config.namespaces[0].block_size = Some(1024)),
        config_error(|config| {
            config.ana_groups = 2;
            config.namespaces[0].ana_group = 3;
        }),
        config_error(|config| {
            config.namespaces.push(NamespaceConfig { nsid: Some(1), ..namespace_config() })
        }),
    ];
    let expected = [
        "serial is",
        "serial is",
        "model is",
        "firmware is",
        "nqn is",
        "nsid_max is 0, expected 1 to 65536",
        "identifier is 1025, expected 1 to 1024",
        "block size is 1024, expected 512 or 4096",
        "ANA group is 3, expected 1 to 2",
        "identifier 1 is in use",
    ];
    for (found, expected) in cases.iter().zip(expected) {
        assert!(found.contains(expected), "{found:?}, expected {expected:?}");
    }
    let twins = vec![
        NamespaceConfig { nsid: Some(3), ..namespace_config() },
        NamespaceConfig { nsid: Some(3), ..namespace_config() },
    ];
    assert!(config_error(|config| config.namespaces = twins).contains("identifier 3 is in use"));
}

#[test]
fn controller_identifier_out_of_range_is_rejected() {
    let it = ControllerConfig::default;
    let capsule = |command_capsule_bytes| TransportModel::Fabrics {
        command_capsule_bytes,
        descriptors_max: 1,
        quiesce: Span::from_ms(500),
    };
    let cases = [
        (ControllerConfig { cntlid: 0xfff0, ..it() }, "cntlid"),
        (ControllerConfig { queue_entries_max: 1, ..it() }, "queue_entries_max"),
        (ControllerConfig { queue_entries_max: 65537, ..it() }, "queue_entries_max"),
        (ControllerConfig { transfer_bytes_max: 4096, ..it() }, "transfer_bytes_max"),
        (ControllerConfig { transport: capsule(63), ..it() }, "command_capsule_bytes is 63"),
        (ControllerConfig { transport: capsule(72), ..it() }, "command_capsule_bytes is 72"),
        (ControllerConfig { transfer_bytes_max: 12288, ..it() }, "a power of two"),
        (ControllerConfig { io_queues_max: 0, ..it() }, "io_queues_max"),
        (ControllerConfig { vectors: 2049, ..it() }, "vectors"),
        (ControllerConfig { event_requests_max: 0, ..it() }, "event_requests_max"),
        (ControllerConfig { aborts_max: 257, ..it() }, "aborts_max"),
        (ControllerConfig { error_entries: 0, ..it() }, "error_entries"),
        (ControllerConfig { keep_alive_granularity: Span::from_ms(99), ..it() }, "keep_alive_step"),
        (ControllerConfig { firmware_bytes_max: 1, ..it() }, "firmware_bytes_max"),
    ];
    let bench = ControllerFixture::new();
    for (config, expected) in cases {
        let config = ControllerConfig { cntlid: config.cntlid.max(2), ..config };
        let found = bench.subsystem.open_controller(bench.now, config).err().unwrap();
        assert!(found.text.contains(expected), "{found:?}, expected {expected:?}");
    }
    let twin = bench.subsystem.open_controller(bench.now, it()).err().unwrap();
    assert!(twin.text.contains("identifier 1 is in use"));
}

#[test]
fn device_with_metadata_is_rejected() {
    struct Guarded;
    impl BlockDevice for Guarded {
        fn limits(&self) -> tenmil_base::Limits {
            tenmil_base::Limits { metadata_size: 8, ..FakeBlockDevice::new().limits() }
        }
        fn channel(&self) -> Result<Box<dyn tenmil_base::IoChannel>, Error> {
            Err(Error::environment("never opened".to_owned()))
        }
    }
    let found = config_error(|config| {
        config.namespaces = vec![NamespaceConfig::new(Arc::new(Guarded))];
    });
    assert!(found.contains("8 bytes of metadata per block"), "{found}");
}

#[test]
fn private_namespace_attaches_to_one_controller() {
    let mut config = SubsystemConfig::new("T1", vec![namespace_config()]);
    config.namespaces.push(NamespaceConfig { is_shared: false, ..namespace_config() });
    config.namespaces.push(NamespaceConfig { is_attached: false, ..namespace_config() });
    let subsystem = Subsystem::new(config).unwrap();
    let open = |cntlid| {
        let config = ControllerConfig { cntlid, ..ControllerConfig::default() };
        subsystem.open_controller(Instant { ns: 0 }, config).unwrap()
    };
    let (first, second) = (open(1), open(2));
    assert_eq!((nsids(&first), nsids(&second)), (vec![1, 2], vec![1]));
    drop(first);
    assert_eq!(nsids(&open(3)), [1, 2], "it is free again");
    let late = NamespaceConfig { is_shared: false, ..namespace_config() };
    assert_eq!(subsystem.add_namespace(late), Ok(4));
    assert_eq!(nsids(&second), [1, 4]);
}

#[test]
fn namespace_growth_is_reported() {
    use std::sync::atomic::{AtomicU64, Ordering};
    struct Growing(AtomicU64);
    impl BlockDevice for Growing {
        fn limits(&self) -> tenmil_base::Limits {
            let block_count = self.0.load(Ordering::Relaxed);
            tenmil_base::Limits { block_count, ..FakeBlockDevice::new().limits() }
        }
        fn channel(&self) -> Result<Box<dyn tenmil_base::IoChannel>, Error> {
            Err(Error::environment("never opened".to_owned()))
        }
    }
    let device = Arc::new(Growing(AtomicU64::new(100)));
    let bench = ControllerFixture::new();
    let nsid = bench.subsystem.add_namespace(NamespaceConfig::new(device.clone())).unwrap();
    let blocks = || bench.controller.namespaces().reader().get().get(nsid).unwrap().block_count;
    assert_eq!(blocks(), 100);
    device.0.store(200, Ordering::Relaxed);
    bench.subsystem.reread_namespace_size(nsid);
    assert_eq!(blocks(), 200);
}

#[test]
fn namespace_block_may_span_several_device_blocks() {
    let small = FakeBlockDevice::with_block_size(512, &EVERYTHING, Durability::Persistent);
    let bench = ControllerFixture::new();
    let wide = NamespaceConfig { block_size: Some(4096), ..NamespaceConfig::new(Arc::new(small)) };
    let nsid = bench.subsystem.add_namespace(wide).unwrap();
    let reader = bench.controller.namespaces().reader();
    let namespace = reader.get().get(nsid).unwrap();
    assert_eq!((namespace.device_blocks_per_block_shift(), namespace.block_count), (3, 256));
}

#[test]
fn snapshot_is_published_only_if_changed() {
    let mut bench = ControllerFixture::with_devices(vec![FakeBlockDevice::new()]);
    let second = bench.open_second_controller(2);
    let mut reader = second.namespaces().reader();
    bench.controller.set_host(HostIdentity::Short(7));
    bench.controller.reset(bench.now);
    assert!(!reader.refresh(), "another host's name is nothing to its queues");
    bench.subsystem.add_namespace(namespace_config()).unwrap();
    assert!(reader.refresh());
    assert_eq!(reader.get().iter().count(), 2);
    bench.subsystem.remove_namespace(1);
    assert!(reader.refresh());
}

#[test]
fn posted_update_wakes_its_controllers() {
    use std::sync::atomic::{AtomicU32, Ordering};
    let bench = ControllerFixture::new();
    let mut second = bench.open_second_controller(2);
    let rings = [Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0))];
    for (controller, rings) in [&bench.controller, &second].into_iter().zip(rings.clone()) {
        controller.set_waker(Arc::new(move || {
            rings.fetch_add(1, Ordering::Relaxed);
        }));
    }
    let counts = || rings.clone().map(|rings| rings.load(Ordering::Relaxed));
    assert_eq!(counts(), [0, 0]);
    let private = NamespaceConfig { is_shared: false, ..namespace_config() };
    bench.subsystem.add_namespace(private).unwrap();
    assert_eq!(counts(), [1, 0], "only the first has it");
    bench.subsystem.remove_namespace(1);
    assert_eq!(counts()[1], 1);
    second.poll(bench.now);
    second.reset(bench.now);
    assert_eq!(counts()[1], 1, "its mail is read");
}
