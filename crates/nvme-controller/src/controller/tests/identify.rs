//! Identify: every data structure, and that its contents are true.

use std::sync::Arc;

use tenmil_base::{Durability, Operation, Span};
use tenmil_wire::admin::Identify;
use tenmil_wire::cache_instance::CacheInstance;
use tenmil_wire::identify::controller::ControllerType;
use tenmil_wire::identify::{
    Cns, CommandSet, CommandSets, ControllerList, IdentifyController, IdentifyControllerNvm,
    IdentifyNamespace, IdentifyNamespaceIndependent, NamespaceIdentifier, NamespaceList,
    namespace_identifiers,
};
use tenmil_wire::{Layout, Status};

use super::fixture::{BLOCKS, ControllerFixture, EVERYTHING, FakeBlockDevice, FakePool};
use crate::controller::{ControllerConfig, NamespaceConfig, TransportModel};
use crate::namespace::{NamespaceIdentity, RevocableCacheInstance};

fn identify_command(cns: Cns, nsid: u32) -> Identify {
    Identify { cns: cns.code(), nsid, ..Identify::default() }
}

fn identify_page<T: Layout>(bench: &mut ControllerFixture, identify: Identify) -> T {
    let bytes = bench.run_for_data(identify).unwrap();
    assert_eq!(bytes.len(), 4096);
    T::parse(&bytes).unwrap()
}

fn controller_page(bench: &mut ControllerFixture) -> IdentifyController {
    identify_page(bench, identify_command(Cns::Controller, 0))
}

fn nsids(bench: &mut ControllerFixture, cns: Cns, after: u32) -> Vec<u32> {
    identify_page::<NamespaceList>(bench, identify_command(cns, after)).iter().collect()
}

#[test]
fn identify_controller_reports_names_and_limits() {
    let config = ControllerConfig { transfer_bytes_max: 1 << 17, ..ControllerConfig::default() };
    let mut bench = ControllerFixture::with_config(vec![FakeBlockDevice::new()], |_| {}, config);
    let id = controller_page(&mut bench);
    assert_eq!(
        (id.sn().trimmed(), id.fr().trimmed()),
        (&b"T1"[..], concat!("t", env!("CARGO_PKG_VERSION")).as_bytes())
    );
    assert_eq!(id.mn().to_string(), "tenmil emulated SSD");
    assert_eq!(&id.subnqn().0[..24], b"nqn.2026-01.org.tenmil:T");
    assert_eq!(id.subnqn().0[25..], [0; 231], "ended by zeroes");
    assert_eq!((id.cntlid(), id.cntrltype()), (1, ControllerType::Io));
    assert_eq!(id.transfer_bytes_max(0), Some(1 << 17));
    assert_eq!((id.acl(), id.aerl(), id.elpe(), id.npss()), (3, 3, 63, 2));
    assert_eq!((id.sqes(), id.cqes(), id.nn()), (0x66, 0x44, 1024));
    assert_eq!((id.kas(), id.tbkas()), (1, true));
    assert_eq!((id.ioccsz(), id.maxcmd()), (0, 0), "fields of fabrics");
}

#[test]
fn identify_controller_describes_capsules_over_fabrics() {
    let transport = TransportModel::Fabrics {
        command_capsule_bytes: 8256,
        descriptors_max: 1,
        quiesce: Span::from_ms(500),
    };
    let config = ControllerConfig { transport, ..ControllerConfig::default() };
    let mut bench = ControllerFixture::with_config(vec![FakeBlockDevice::new()], |_| {}, config);
    let id = controller_page(&mut bench);
    assert_eq!((id.ioccsz(), id.iorcsz(), id.msdbd(), id.maxcmd()), (516, 1, 1, 4096));
    assert!(!id.doorbell_buffer());
}

#[test]
fn ram_device_is_reported_as_a_volatile_cache() {
    for (durability, expected) in [
        (Durability::NonPersistent, true),
        (Durability::VolatileCache, true),
        (Durability::Persistent, false),
    ] {
        let shelf = FakeBlockDevice::with_block_size(512, &EVERYTHING, durability);
        let id = controller_page(&mut ControllerFixture::with_devices(vec![shelf]));
        assert_eq!(id.vwcp(), expected, "{durability:?}");
    }
}

/// Bits of optional support, as determined by the configuration.
#[test]
fn optional_capability_bits_follow_the_device_capabilities() {
    let plain = controller_page(&mut ControllerFixture::new());
    // Format, firmware, self-test, doorbell buffers.
    assert_eq!(plain.oacs(), 0b1_0001_0110);
    // All commands up to Copy.
    assert_eq!(plain.oncs(), 0b1_1111_1111);
    assert_eq!((plain.fuses(), plain.vwc(), plain.nwpc(), plain.fna()), (1, 0b111, 0b111, 0));
    assert_eq!((plain.lpa(), plain.frmw()), (0b10_1110, 0b1_0111));
    assert_eq!((plain.anars(), plain.anacap(), plain.nanagrpid()), (false, 0, 0));
    assert_eq!(plain.oaes(), 0x300);
    assert_eq!(plain.ctratt(), 0b100_0001);

    let few = [Operation::Read, Operation::Write];
    let shelf = FakeBlockDevice::with_block_size(512, &few, Durability::Persistent);
    let config = ControllerConfig {
        fused_compare_and_write: false,
        transport: TransportModel::Memory { doorbell_buffers: false },
        sgls: 0,
        ..ControllerConfig::default()
    };
    let change = |config: &mut super::super::SubsystemConfig| config.reservations = false;
    let poor = controller_page(&mut ControllerFixture::with_config(vec![shelf], change, config));
    assert_eq!(poor.oacs(), 0b1_0100, "no format without write zeroes");
    assert_eq!(poor.oncs(), 0b1_1101_1101, "neither write uncorrectable nor reservations");
    assert_eq!((poor.fuses(), poor.vwcp(), poor.sgls()), (0, false, 0));

    let change = |config: &mut super::super::SubsystemConfig| {
        config.ana_groups = 3;
        config.pool = Some(Box::new(FakePool(1 << 20)));
    };
    let mut bench = ControllerFixture::with_config(
        vec![FakeBlockDevice::new()],
        change,
        ControllerConfig::default(),
    );
    let rich = controller_page(&mut bench);
    assert!(rich.namespace_management() && rich.anars());
    assert_eq!((rich.anagrpmax(), rich.nanagrpid(), rich.anacap()), (3, 3, 0b1101_1111));
    assert_eq!((rich.mnan(), plain.mnan()), (rich.nn(), plain.nn()), "none of them may be 0");
    assert_eq!(rich.oaes(), 0xb00);
    assert_eq!(rich.tnvmcap(), (1 << 20) + u128::from(BLOCKS) * 512);
    assert_eq!(rich.unvmcap(), 1 << 20);
}

#[test]
fn identify_data_is_stable_across_restarts() {
    for identify in [
        identify_command(Cns::Controller, 0),
        identify_command(Cns::Namespace, 1),
        identify_command(Cns::Descriptors, 1),
    ] {
        assert_eq!(
            ControllerFixture::new().run_for_data(identify),
            ControllerFixture::new().run_for_data(identify)
        );
    }
}

#[test]
fn identify_namespace_uses_the_namespace_block_size() {
    let mut bench = ControllerFixture::new();
    let id: IdentifyNamespace = identify_page(&mut bench, identify_command(Cns::Namespace, 1));
    assert_eq!((id.nsze(), id.ncap(), id.nuse()), (BLOCKS, BLOCKS, BLOCKS));
    assert_eq!((id.nlbaf(), id.format_index(), id.block_bytes()), (1, 0, Some(512)));
    assert_eq!(id.lbaf(1).and_then(|format| format.block_bytes()), Some(4096));
    assert_eq!((id.nawun(), id.nawupf(), id.nsabp()), (15, 15, true));
    assert_eq!((id.noiob(), id.nvmcap()), (256, u128::from(BLOCKS) * 512));
    assert_eq!((id.mssrl(), id.msrc(), id.rescap()), (u16::MAX, 127, 0xff));
    assert!(id.shrns() && id.wzds() && !id.cwp());
    assert_eq!((id.mc(), id.dpc(), id.dps()), (0, 0, 0), "no metadata, no protection");

    let wide = NamespaceConfig {
        block_size: Some(4096),
        is_shared: false,
        ..NamespaceConfig::new(Arc::new(FakeBlockDevice::new()))
    };
    let nsid = bench.subsystem.add_namespace(wide).unwrap();
    let id: IdentifyNamespace = identify_page(&mut bench, identify_command(Cns::Namespace, nsid));
    assert_eq!((id.nsze(), id.format_index(), id.block_bytes()), (BLOCKS / 8, 1, Some(4096)));
    assert_eq!((id.nawun(), id.noiob(), id.shrns()), (1, 32, false));
}

#[test]
fn device_with_4096_byte_blocks_has_one_lba_format() {
    let mut bench = ControllerFixture::with_devices(vec![FakeBlockDevice::with_block_size(
        4096,
        &EVERYTHING,
        Durability::Persistent,
    )]);
    let id: IdentifyNamespace = identify_page(&mut bench, identify_command(Cns::Namespace, 1));
    assert_eq!((id.nlbaf(), id.block_bytes(), id.nsze()), (0, Some(4096), BLOCKS));
}

#[test]
fn unused_nsid_returns_zeroes_and_invalid_nsid_is_rejected() {
    let mut bench = ControllerFixture::new();
    let zeroes = Ok(vec![0; 4096]);
    let invalid = Err(Status::INVALID_NAMESPACE_OR_FORMAT);
    let structures = [
        Cns::Namespace,
        Cns::AllocatedNamespace,
        Cns::IndependentNamespace,
        Cns::IndependentAllocatedNamespace,
        Cns::CommandSetNamespace,
        Cns::CommandSetAllocatedNamespace,
    ];
    for cns in structures {
        for (nsid, expected) in
            [(2, &zeroes), (1024, &zeroes), (0, &invalid), (1025, &invalid), (u32::MAX, &invalid)]
        {
            assert_eq!(
                &bench.run_for_data(identify_command(cns, nsid)),
                expected,
                "{cns:?} {nsid:#x}"
            );
        }
    }
    assert_eq!(
        bench.run_for_data(identify_command(Cns::Descriptors, 2)),
        Err(Status::INVALID_FIELD)
    );
    assert_eq!(bench.run_for_data(identify_command(Cns::Descriptors, 0)), invalid);
    assert_eq!(bench.run_for_data(identify_command(Cns::Descriptors, u32::MAX)), invalid);
}

#[test]
fn broadcast_nsid_returns_common_namespace_capabilities() {
    let mut bench = ControllerFixture::with_pool(vec![], 1 << 20);
    let id: IdentifyNamespace =
        identify_page(&mut bench, identify_command(Cns::Namespace, u32::MAX));
    assert_eq!((id.nsze(), id.nlbaf()), (0, 1));
    assert_eq!(id.lbaf(0).and_then(|format| format.block_bytes()), Some(512));
    assert_eq!(id.lbaf(1).and_then(|format| format.block_bytes()), Some(4096));
    assert!(bench.run_for_data(identify_command(Cns::CommandSetNamespace, u32::MAX)).is_ok());
}

#[test]
fn namespace_lists_start_after_the_given_nsid() {
    let mut bench = ControllerFixture::with_devices(vec![
        FakeBlockDevice::new(),
        FakeBlockDevice::new(),
        FakeBlockDevice::new(),
    ]);
    let hidden = NamespaceConfig {
        is_attached: false,
        ..NamespaceConfig::new(Arc::new(FakeBlockDevice::new()))
    };
    assert_eq!(bench.subsystem.add_namespace(hidden), Ok(4));
    for cns in [Cns::ActiveNamespaces, Cns::CommandSetActiveNamespaces] {
        assert_eq!(nsids(&mut bench, cns, 0), [1, 2, 3]);
        assert_eq!(nsids(&mut bench, cns, 1), [2, 3]);
        assert_eq!(nsids(&mut bench, cns, 3), []);
    }
    for cns in [Cns::AllocatedNamespaces, Cns::CommandSetAllocatedNamespaces] {
        assert_eq!(nsids(&mut bench, cns, 2), [3, 4]);
        for nsid in [u32::MAX, u32::MAX - 1] {
            assert_eq!(
                bench.run_for_data(identify_command(cns, nsid)),
                Err(Status::INVALID_NAMESPACE_OR_FORMAT)
            );
        }
    }
    let attached: IdentifyNamespace =
        identify_page(&mut bench, identify_command(Cns::Namespace, 4));
    let allocated: IdentifyNamespace =
        identify_page(&mut bench, identify_command(Cns::AllocatedNamespace, 4));
    assert_eq!((attached.nsze(), allocated.nsze()), (0, BLOCKS));
}

#[test]
fn controller_lists_start_at_the_given_cntlid() {
    let mut bench = ControllerFixture::new();
    let _others = [bench.open_second_controller(7), bench.open_second_controller(3)];
    let mut list = |cns, nsid, cntid| {
        let identify = Identify { cntid, ..identify_command(cns, nsid) };
        identify_page::<ControllerList>(&mut bench, identify).iter().collect::<Vec<_>>()
    };
    assert_eq!(list(Cns::SubsystemControllers, 0, 0), [1, 3, 7]);
    assert_eq!(list(Cns::SubsystemControllers, 0, 4), [7]);
    assert_eq!(list(Cns::NamespaceControllers, 1, 2), [3, 7]);
    assert_eq!(list(Cns::NamespaceControllers, 2, 0), [], "no controller is attached");
}

#[test]
fn namespace_has_configured_identifiers_or_a_derived_uuid() {
    let identity = NamespaceIdentity { eui64: [1; 8], nguid: [2; 16], uuid: [0; 16] };
    let mut bench = ControllerFixture::new();
    let named =
        NamespaceConfig { identity, ..NamespaceConfig::new(Arc::new(FakeBlockDevice::new())) };
    bench.subsystem.add_namespace(named).unwrap();
    let names = |bench: &mut ControllerFixture, nsid| {
        let bytes = bench.run_for_data(identify_command(Cns::Descriptors, nsid)).unwrap();
        namespace_identifiers(&bytes).collect::<Vec<_>>()
    };
    let csi = NamespaceIdentifier::Csi(CommandSet::Nvm);
    let expected = [NamespaceIdentifier::Eui64([1; 8]), NamespaceIdentifier::Nguid([2; 16]), csi];
    assert_eq!(names(&mut bench, 2), expected);
    let [NamespaceIdentifier::Uuid(uuid), last] = names(&mut bench, 1)[..] else {
        panic!("expected a UUID and the command set")
    };
    assert_eq!((uuid[6] >> 4, uuid[8] >> 6, last), (8, 0b10, csi), "version and variant");
    let third = NamespaceConfig::new(Arc::new(FakeBlockDevice::new()));
    bench.subsystem.add_namespace(third).unwrap();
    assert_ne!(names(&mut bench, 3)[0], NamespaceIdentifier::Uuid(uuid));
}

#[test]
fn only_the_nvm_command_set_is_supported() {
    let mut bench = ControllerFixture::new();
    let of_sets = [
        Cns::CommandSetNamespace,
        Cns::CommandSetController,
        Cns::CommandSetActiveNamespaces,
        Cns::CommandSetAllocatedNamespaces,
        Cns::CommandSetAllocatedNamespace,
    ];
    for cns in of_sets {
        let nsid = 1;
        assert!(bench.run_for_data(identify_command(cns, nsid)).is_ok(), "{cns:?}");
        for csi in [1, 2, 0x30, 0xff] {
            let identify = Identify { csi, ..identify_command(cns, nsid) };
            assert_eq!(
                bench.run_for_data(identify),
                Err(Status::INVALID_FIELD),
                "{cns:?} {csi:#x}"
            );
        }
    }
    let nvm: IdentifyControllerNvm =
        identify_page(&mut bench, identify_command(Cns::CommandSetController, 0));
    assert_eq!((nvm.ver().major(), nvm.ver().minor(), nvm.vsl()), (1, 1, 0));

    let sets = Identify { cntid: u16::MAX, ..identify_command(Cns::CommandSets, 0) };
    let sets: CommandSets = identify_page(&mut bench, sets);
    assert_eq!(sets.iter().map(|vector| vector.0).collect::<Vec<_>>(), [1]);
    let unknown = Identify { cntid: 9, ..identify_command(Cns::CommandSets, 0) };
    assert_eq!(bench.run_for_data(unknown), Err(Status::INVALID_FIELD));
}

#[test]
fn independent_identify_reports_write_cache_and_readiness() {
    let shelf = |durability| FakeBlockDevice::with_block_size(512, &EVERYTHING, durability);
    let mut bench = ControllerFixture::with_devices(vec![
        FakeBlockDevice::new(),
        shelf(Durability::Persistent),
        shelf(Durability::NonPersistent),
    ]);
    let mut of = |nsid| -> IdentifyNamespaceIndependent {
        identify_page(&mut bench, identify_command(Cns::IndependentNamespace, nsid))
    };
    assert_eq!((of(1).vwcnp(), of(2).vwcnp(), of(3).vwcnp()), (false, true, false));
    assert!(of(1).nrdy() && of(1).shrns());
    assert_eq!(of(1).rescap(), 0xff);
}

#[test]
fn unsupported_cns_is_rejected() {
    let known = [
        0x00, 0x01, 0x02, 0x03, 0x05, 0x06, 0x07, 0x08, 0x10, 0x11, 0x12, 0x13, 0x1a, 0x1b, 0x1c,
        0x1f,
    ];
    let mut bench = ControllerFixture::new();
    for cns in 0..=255 {
        let identify = Identify { cns, nsid: 1, cntid: 1, ..Identify::default() };
        assert_eq!(bench.run_for_data(identify).is_ok(), known.contains(&cns), "{cns:#04x}");
        if !known.contains(&cns) {
            assert_eq!(bench.run_for_data(identify), Err(Status::INVALID_FIELD), "{cns:#04x}");
        }
    }
}

#[test]
fn identify_namespace_reports_its_cache_instance() {
    let mut bench = ControllerFixture::new();
    let instance = CacheInstance([7; 16]);
    let cache = Some(RevocableCacheInstance::new(instance));
    let vouched =
        NamespaceConfig { cache, ..NamespaceConfig::new(Arc::new(FakeBlockDevice::new())) };
    bench.subsystem.add_namespace(vouched).unwrap();
    let of = |bench: &mut ControllerFixture, nsid| {
        CacheInstance::from_identify_namespace(&identify_page::<IdentifyNamespace>(
            bench,
            identify_command(Cns::Namespace, nsid),
        ))
    };
    assert_eq!((of(&mut bench, 1), of(&mut bench, 2)), (None, Some(instance)));
}
