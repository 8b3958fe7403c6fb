//! Corrupted Identify data: whole pages and single fields.

use tenmil_wire::AdminOpcode;

use crate::fault_injector::{Fault, PlannedFault, pokes};
use crate::scenario::{Scenario, ScenarioCheck};
use crate::test_run::RunStep;

pub(super) fn identify_scenarios() -> Vec<Scenario> {
    [corrupted_pages(), corrupted_controller_fields(), corrupted_namespace_fields()].concat()
}

fn identify_scenario(name: String, musts: &[ScenarioCheck], fault: Fault) -> Scenario {
    let musts = [musts, &[ScenarioCheck::Strike(1)]].concat();
    Scenario::default_session(name, &musts)
        .with_faults(&[PlannedFault::for_admin_opcode(AdminOpcode::Identify, fault)])
}

/// Whole pages of random bytes, zeroes or ones. CNS values: Base 2.1 §5.1.13.1, figure 310.
fn corrupted_pages() -> Vec<Scenario> {
    let mut table = Vec::new();
    for (page_name, page) in [
        ("namespace", 0x00),
        ("controller", 0x01),
        ("active-list", 0x02),
        ("descriptors", 0x03),
        ("controller-nvm", 0x06),
    ] {
        for (how_name, fault) in [
            ("noise", pokes::page_random_fault(Some(page))),
            ("zeroes", pokes::page_fill_fault(Some(page), 0)),
            ("ones", pokes::page_fill_fault(Some(page), 0xff)),
            ("count", pokes::page_counting_fault(page, 1)),
        ] {
            table.push(identify_scenario(
                format!("identify/page/{page_name}/{how_name}"),
                &[],
                fault,
            ));
        }
    }
    table
}

/// Fields of the Identify Controller data structure (Base 2.1 §5.1.13.2.1, figure 312).
fn corrupted_controller_fields() -> Vec<Scenario> {
    let fine: &[ScenarioCheck] =
        &[ScenarioCheck::Attach, ScenarioCheck::Succeed, ScenarioCheck::Survive];
    let rows: [(&str, u16, u32, u64, &[ScenarioCheck]); 17] = [
        ("mdts-none", 77, 1, 0, &[ScenarioCheck::Attach, ScenarioCheck::Survive]),
        ("mdts-two-pages", 77, 1, 1, fine),
        ("mdts-huge", 77, 1, 0xff, &[ScenarioCheck::Attach, ScenarioCheck::Survive]),
        ("version-zero", 80, 4, 0, fine),
        ("version-ones", 80, 4, 0xffff_ffff, fine),
        ("oacs-all", 256, 2, 0xffff, fine),
        ("acl-max", 258, 1, 0xff, fine),
        ("aerl-max", 259, 1, 0xff, fine),
        ("rtd3e-max", 88, 4, 0xffff_ffff, fine),
        ("kas-max", 320, 2, 0xffff, fine),
        ("sqes-small", 512, 1, 0x55, &[ScenarioCheck::Refuse("SQES"), ScenarioCheck::Reattach]),
        ("cqes-large", 513, 1, 0x66, &[ScenarioCheck::Refuse("CQES"), ScenarioCheck::Reattach]),
        ("nn-zero", 516, 4, 0, &[ScenarioCheck::Refuse("at most NN"), ScenarioCheck::Reattach]),
        ("nn-max", 516, 4, 0xffff_ffff, fine),
        ("oncs-none", 520, 2, 0, fine),
        ("vwc-none", 525, 1, 0, &[ScenarioCheck::Attach, ScenarioCheck::Survive]),
        ("sgls-reserved", 536, 4, 3, &[ScenarioCheck::Refuse("SGLS"), ScenarioCheck::Reattach]),
    ];
    rows.into_iter()
        .map(|(name, offset, width, value, musts)| {
            let fault = pokes::identify_controller_fault(offset, width, value);
            identify_scenario(format!("identify/controller/{name}"), musts, fault)
        })
        .collect()
}

/// Fields of the Identify Namespace data structure (NVM 1.1 §4.1.5.1, figure 114).
fn corrupted_namespace_fields() -> Vec<Scenario> {
    let unusable: &[ScenarioCheck] = &[
        ScenarioCheck::Attach,
        ScenarioCheck::ReportsEvent("NamespaceUnusable"),
        ScenarioCheck::NoQueues,
    ];
    let fine: &[ScenarioCheck] =
        &[ScenarioCheck::Attach, ScenarioCheck::Succeed, ScenarioCheck::Survive];
    let rows: [(&str, u16, u32, u64, &[ScenarioCheck]); 13] = [
        // Treated as an inactive namespace.
        (
            "nsze-zero",
            0,
            8,
            0,
            &[
                ScenarioCheck::Attach,
                ScenarioCheck::NoQueues,
                ScenarioCheck::NoEvent("NamespaceAttached"),
            ],
        ),
        ("nsze-max", 0, 8, u64::MAX, unusable),
        ("nsze-one", 0, 8, 1, &[ScenarioCheck::Attach]),
        ("ncap-above-nsze", 8, 8, u64::MAX, unusable),
        ("flbas-beyond", 26, 1, 0x0f, unusable),
        ("noiob-odd", 46, 2, 7, fine),
        ("noiob-one", 46, 2, 1, fine),
        ("dps-reserved", 29, 1, 7, unusable),
        ("dps-without-metadata", 29, 1, 1, unusable),
        ("lbads-zero", 130, 1, 0, unusable),
        ("lbads-small", 130, 1, 3, unusable),
        ("lbads-huge", 130, 1, 63, unusable),
        ("lbads-4096", 130, 1, 12, &[ScenarioCheck::Attach]),
    ];
    rows.into_iter()
        .map(|(name, offset, width, value, musts)| {
            let fault = pokes::identify_namespace_fault(offset, width, value);
            identify_scenario(format!("identify/namespace/{name}"), musts, fault)
        })
        .chain([unexpected_metadata()])
        .collect()
}

/// A namespace that seems to have metadata: requests without metadata fail in the host, also after
/// the faults have stopped.
fn unexpected_metadata() -> Scenario {
    let musts = [ScenarioCheck::Attach, ScenarioCheck::Fail, ScenarioCheck::Survive];
    let fault = pokes::identify_namespace_fault(128, 2, 0xffff);
    identify_scenario("identify/namespace/metadata-max".to_owned(), &musts, fault).with_steps(&[
        RunStep::Attach,
        RunStep::Work,
        RunStep::StopFaults,
        RunStep::Recover,
        RunStep::ShutDown,
    ])
}
