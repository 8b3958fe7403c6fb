//! Identify: every data structure, and that its contents are true.

use std::sync::Arc;

use tenmil_base::{Durability, Operation, Span};
use tenmil_wire::admin::Identify;
use tenmil_wire::cache::CacheInstance;
use tenmil_wire::identify::controller::ControllerType;
use tenmil_wire::identify::{
    Cns, CommandSet, CommandSets, ControllerList, IdentifyController, IdentifyControllerNvm,
    IdentifyNamespace, IdentifyNamespaceIndependent, NamespaceIdentifier, NamespaceList,
    descriptors,
};
use tenmil_wire::{Layout, Status};

use super::bench::{BLOCKS, Bench, EVERYTHING, Pool, Shelf};
use crate::controller::{ControllerConfig, NamespaceConfig, TransportModel};
use crate::namespace::{Identity, RevocableCacheInstance};

fn ask(cns: Cns, nsid: u32) -> Identify {
    Identify { cns: cns.code(), nsid, ..Identify::default() }
}

fn page<T: Layout>(bench: &mut Bench, identify: Identify) -> T {
    let bytes = bench.get(identify).unwrap();
    assert_eq!(bytes.len(), 4096);
    T::parse(&bytes).unwrap()
}

fn controller_page(bench: &mut Bench) -> IdentifyController {
    page(bench, ask(Cns::Controller, 0))
}

fn nsids(bench: &mut Bench, cns: Cns, after: u32) -> Vec<u32> {
    page::<NamespaceList>(bench, ask(cns, after)).iter().collect()
}

#[test]
fn the_controller_says_who_it_is_and_how_much_it_takes() {
    let config = ControllerConfig { transfer_bytes_max: 1 << 17, ..ControllerConfig::default() };
    let mut bench = Bench::with(vec![Shelf::new()], |_| {}, config);
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
fn over_fabrics_capsules_are_described() {
    let transport = TransportModel::Fabrics {
        command_capsule_bytes: 8256,
        descriptors_max: 1,
        quiesce: Span::from_ms(500),
    };
    let config = ControllerConfig { transport, ..ControllerConfig::default() };
    let mut bench = Bench::with(vec![Shelf::new()], |_| {}, config);
    let id = controller_page(&mut bench);
    assert_eq!((id.ioccsz(), id.iorcsz(), id.msdbd(), id.maxcmd()), (516, 1, 1, 4096));
    assert!(!id.doorbell_buffer());
}

#[test]
fn medium_in_memory_is_reported_as_a_volatile_cache() {
    for (durability, expected) in [
        (Durability::NonPersistent, true),
        (Durability::VolatileCache, true),
        (Durability::Persistent, false),
    ] {
        let shelf = Shelf::with(512, &EVERYTHING, durability);
        let id = controller_page(&mut Bench::over(vec![shelf]));
        assert_eq!(id.vwcp(), expected, "{durability:?}");
    }
}

/// Bits of optional support, as determined by the configuration.
#[test]
fn every_optional_bit_follows_what_there_is() {
    let plain = controller_page(&mut Bench::new());
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
    let shelf = Shelf::with(512, &few, Durability::Persistent);
    let config = ControllerConfig {
        fused_compare_and_write: false,
        transport: TransportModel::Memory { doorbell_buffers: false },
        sgls: 0,
        ..ControllerConfig::default()
    };
    let change = |config: &mut super::super::SubsystemConfig| config.reservations = false;
    let poor = controller_page(&mut Bench::with(vec![shelf], change, config));
    assert_eq!(poor.oacs(), 0b1_0100, "no format without write zeroes");
    assert_eq!(poor.oncs(), 0b1_1101_1101, "neither write uncorrectable nor reservations");
    assert_eq!((poor.fuses(), poor.vwcp(), poor.sgls()), (0, false, 0));

    let change = |config: &mut super::super::SubsystemConfig| {
        config.ana_groups = 3;
        config.pool = Some(Box::new(Pool(1 << 20)));
    };
    let mut bench = Bench::with(vec![Shelf::new()], change, ControllerConfig::default());
    let rich = controller_page(&mut bench);
    assert!(rich.namespace_management() && rich.anars());
    assert_eq!((rich.anagrpmax(), rich.nanagrpid(), rich.anacap()), (3, 3, 0b1101_1111));
    assert_eq!((rich.mnan(), plain.mnan()), (rich.nn(), plain.nn()), "none of them may be 0");
    assert_eq!(rich.oaes(), 0xb00);
    assert_eq!(rich.tnvmcap(), (1 << 20) + u128::from(BLOCKS) * 512);
    assert_eq!(rich.unvmcap(), 1 << 20);
}

#[test]
fn identify_is_the_same_after_a_restart() {
    for identify in [ask(Cns::Controller, 0), ask(Cns::Namespace, 1), ask(Cns::Descriptors, 1)] {
        assert_eq!(Bench::new().get(identify), Bench::new().get(identify));
    }
}

#[test]
fn a_namespace_is_described_in_its_own_blocks() {
    let mut bench = Bench::new();
    let id: IdentifyNamespace = page(&mut bench, ask(Cns::Namespace, 1));
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
        ..NamespaceConfig::new(Arc::new(Shelf::new()))
    };
    let nsid = bench.subsystem.add_namespace(wide).unwrap();
    let id: IdentifyNamespace = page(&mut bench, ask(Cns::Namespace, nsid));
    assert_eq!((id.nsze(), id.format_index(), id.block_bytes()), (BLOCKS / 8, 1, Some(4096)));
    assert_eq!((id.nawun(), id.noiob(), id.shrns()), (1, 32, false));
}

#[test]
fn a_medium_of_large_blocks_has_one_format() {
    let mut bench = Bench::over(vec![Shelf::with(4096, &EVERYTHING, Durability::Persistent)]);
    let id: IdentifyNamespace = page(&mut bench, ask(Cns::Namespace, 1));
    assert_eq!((id.nlbaf(), id.block_bytes(), id.nsze()), (0, Some(4096), BLOCKS));
}

#[test]
fn identifiers_of_no_namespace_are_zeroes_or_refused() {
    let mut bench = Bench::new();
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
            assert_eq!(&bench.get(ask(cns, nsid)), expected, "{cns:?} {nsid:#x}");
        }
    }
    assert_eq!(bench.get(ask(Cns::Descriptors, 2)), Err(Status::INVALID_FIELD));
    assert_eq!(bench.get(ask(Cns::Descriptors, 0)), invalid);
    assert_eq!(bench.get(ask(Cns::Descriptors, u32::MAX)), invalid);
}

#[test]
fn all_ones_names_what_new_namespaces_have_in_common() {
    let mut bench = Bench::with_pool(vec![], 1 << 20);
    let id: IdentifyNamespace = page(&mut bench, ask(Cns::Namespace, u32::MAX));
    assert_eq!((id.nsze(), id.nlbaf()), (0, 1));
    assert_eq!(id.lbaf(0).and_then(|format| format.block_bytes()), Some(512));
    assert_eq!(id.lbaf(1).and_then(|format| format.block_bytes()), Some(4096));
    assert!(bench.get(ask(Cns::CommandSetNamespace, u32::MAX)).is_ok());
}

#[test]
fn lists_begin_behind_the_identifier_given_and_tell_attached_from_allocated() {
    let mut bench = Bench::over(vec![Shelf::new(), Shelf::new(), Shelf::new()]);
    let hidden =
        NamespaceConfig { is_attached: false, ..NamespaceConfig::new(Arc::new(Shelf::new())) };
    assert_eq!(bench.subsystem.add_namespace(hidden), Ok(4));
    for cns in [Cns::ActiveNamespaces, Cns::CommandSetActiveNamespaces] {
        assert_eq!(nsids(&mut bench, cns, 0), [1, 2, 3]);
        assert_eq!(nsids(&mut bench, cns, 1), [2, 3]);
        assert_eq!(nsids(&mut bench, cns, 3), []);
    }
    for cns in [Cns::AllocatedNamespaces, Cns::CommandSetAllocatedNamespaces] {
        assert_eq!(nsids(&mut bench, cns, 2), [3, 4]);
        for nsid in [u32::MAX, u32::MAX - 1] {
            assert_eq!(bench.get(ask(cns, nsid)), Err(Status::INVALID_NAMESPACE_OR_FORMAT));
        }
    }
    let attached: IdentifyNamespace = page(&mut bench, ask(Cns::Namespace, 4));
    let allocated: IdentifyNamespace = page(&mut bench, ask(Cns::AllocatedNamespace, 4));
    assert_eq!((attached.nsze(), allocated.nsze()), (0, BLOCKS));
}

#[test]
fn controllers_are_listed_from_the_identifier_given() {
    let mut bench = Bench::new();
    let _others = [bench.second(7), bench.second(3)];
    let mut list = |cns, nsid, cntid| {
        let identify = Identify { cntid, ..ask(cns, nsid) };
        page::<ControllerList>(&mut bench, identify).iter().collect::<Vec<_>>()
    };
    assert_eq!(list(Cns::SubsystemControllers, 0, 0), [1, 3, 7]);
    assert_eq!(list(Cns::SubsystemControllers, 0, 4), [7]);
    assert_eq!(list(Cns::NamespaceControllers, 1, 2), [3, 7]);
    assert_eq!(list(Cns::NamespaceControllers, 2, 0), [], "nobody has it");
}

#[test]
fn a_namespace_has_the_names_it_was_given_or_a_uuid_of_its_own() {
    let identity = Identity { eui64: [1; 8], nguid: [2; 16], uuid: [0; 16] };
    let mut bench = Bench::new();
    let named = NamespaceConfig { identity, ..NamespaceConfig::new(Arc::new(Shelf::new())) };
    bench.subsystem.add_namespace(named).unwrap();
    let names = |bench: &mut Bench, nsid| {
        let bytes = bench.get(ask(Cns::Descriptors, nsid)).unwrap();
        descriptors(&bytes).collect::<Vec<_>>()
    };
    let csi = NamespaceIdentifier::Csi(CommandSet::Nvm);
    let expected = [NamespaceIdentifier::Eui64([1; 8]), NamespaceIdentifier::Nguid([2; 16]), csi];
    assert_eq!(names(&mut bench, 2), expected);
    let [NamespaceIdentifier::Uuid(uuid), last] = names(&mut bench, 1)[..] else {
        panic!("expected a UUID and the command set")
    };
    assert_eq!((uuid[6] >> 4, uuid[8] >> 6, last), (8, 0b10, csi), "version and variant");
    let third = NamespaceConfig::new(Arc::new(Shelf::new()));
    bench.subsystem.add_namespace(third).unwrap();
    assert_ne!(names(&mut bench, 3)[0], NamespaceIdentifier::Uuid(uuid));
}

#[test]
fn only_the_nvm_command_set_is_there() {
    let mut bench = Bench::new();
    let of_sets = [
        Cns::CommandSetNamespace,
        Cns::CommandSetController,
        Cns::CommandSetActiveNamespaces,
        Cns::CommandSetAllocatedNamespaces,
        Cns::CommandSetAllocatedNamespace,
    ];
    for cns in of_sets {
        let nsid = 1;
        assert!(bench.get(ask(cns, nsid)).is_ok(), "{cns:?}");
        for csi in [1, 2, 0x30, 0xff] {
            let identify = Identify { csi, ..ask(cns, nsid) };
            assert_eq!(bench.get(identify), Err(Status::INVALID_FIELD), "{cns:?} {csi:#x}");
        }
    }
    let nvm: IdentifyControllerNvm = page(&mut bench, ask(Cns::CommandSetController, 0));
    assert_eq!((nvm.ver().major(), nvm.ver().minor(), nvm.vsl()), (1, 1, 0));

    let sets = Identify { cntid: u16::MAX, ..ask(Cns::CommandSets, 0) };
    let sets: CommandSets = page(&mut bench, sets);
    assert_eq!(sets.iter().map(|vector| vector.0).collect::<Vec<_>>(), [1]);
    let unknown = Identify { cntid: 9, ..ask(Cns::CommandSets, 0) };
    assert_eq!(bench.get(unknown), Err(Status::INVALID_FIELD));
}

#[test]
fn independent_data_say_whether_there_is_a_cache_and_whether_it_is_ready() {
    let shelf = |durability| Shelf::with(512, &EVERYTHING, durability);
    let mut bench = Bench::over(vec![
        Shelf::new(),
        shelf(Durability::Persistent),
        shelf(Durability::NonPersistent),
    ]);
    let mut of = |nsid| -> IdentifyNamespaceIndependent {
        page(&mut bench, ask(Cns::IndependentNamespace, nsid))
    };
    assert_eq!((of(1).vwcnp(), of(2).vwcnp(), of(3).vwcnp()), (false, true, false));
    assert!(of(1).nrdy() && of(1).shrns());
    assert_eq!(of(1).rescap(), 0xff);
}

#[test]
fn every_other_structure_is_refused() {
    let known = [
        0x00, 0x01, 0x02, 0x03, 0x05, 0x06, 0x07, 0x08, 0x10, 0x11, 0x12, 0x13, 0x1a, 0x1b, 0x1c,
        0x1f,
    ];
    let mut bench = Bench::new();
    for cns in 0..=255 {
        let identify = Identify { cns, nsid: 1, cntid: 1, ..Identify::default() };
        assert_eq!(bench.get(identify).is_ok(), known.contains(&cns), "{cns:#04x}");
        if !known.contains(&cns) {
            assert_eq!(bench.get(identify), Err(Status::INVALID_FIELD), "{cns:#04x}");
        }
    }
}

#[test]
fn namespace_says_the_instance_of_its_cache_if_it_has_one() {
    let mut bench = Bench::new();
    let instance = CacheInstance([7; 16]);
    let cache = Some(RevocableCacheInstance::new(instance));
    let vouched = NamespaceConfig { cache, ..NamespaceConfig::new(Arc::new(Shelf::new())) };
    bench.subsystem.add_namespace(vouched).unwrap();
    let of = |bench: &mut Bench, nsid| {
        CacheInstance::of(&page::<IdentifyNamespace>(bench, ask(Cns::Namespace, nsid)))
    };
    assert_eq!((of(&mut bench, 1), of(&mut bench, 2)), (None, Some(instance)));
}
