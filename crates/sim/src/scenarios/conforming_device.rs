//! No faults: every configuration works with a conforming device. A failure here is a bug of the
//! driver or the harness.

use tenmil_base::{Durability, Span};
use tenmil_nvme_host::{CompletionDoorbell, FastPathOptions};

use crate::device_memory::DataAccessMode;
use crate::scenario::{Scenario, ScenarioCheck};
use crate::simulation::WorldOptions;
use crate::workload::{DataLayout, OperationMix};

const MUSTS: &[ScenarioCheck] = &[
    ScenarioCheck::Attach,
    ScenarioCheck::Succeed,
    ScenarioCheck::NoEvent("ResetStarted"),
    ScenarioCheck::Survive,
];

pub(super) fn conforming_scenarios() -> Vec<Scenario> {
    [memory_layouts(), driver_options(), workload_shapes()].concat()
}

/// Data access of the controller, combined with data layouts.
fn memory_layouts() -> Vec<Scenario> {
    let mut table = Vec::new();
    for (reach_name, reach) in [
        ("direct", DataAccessMode::Direct),
        ("copied", DataAccessMode::Copied),
        ("late", DataAccessMode::Late(Span::from_us(40))),
    ] {
        for (pieces_name, pieces) in [
            ("whole", DataLayout::Whole),
            ("offset", DataLayout::Offset),
            ("pages", DataLayout::Pages),
        ] {
            for sgls in [true, false] {
                let name = format!("honest/{reach_name}/{pieces_name}/sgls-{sgls}");
                table.push(Scenario::default_session(name, MUSTS).with_world(|options| {
                    options.function.reach = reach;
                    options.function.sgls = sgls;
                    options.profile.pieces = pieces;
                    options.profile.blocks = (1, 64);
                    options.profile.span = 256;
                }));
            }
        }
    }
    table
}

/// Each driver option.
fn driver_options() -> Vec<Scenario> {
    let fast = FastPathOptions::default();
    let choices = [
        ("doorbell-each-command", FastPathOptions { doorbell_batching: false, ..fast }),
        (
            "doorbell-each-completion",
            FastPathOptions { completion_doorbell: CompletionDoorbell::Each, ..fast },
        ),
        (
            "doorbell-deferred",
            FastPathOptions { completion_doorbell: CompletionDoorbell::Deferred, ..fast },
        ),
    ];
    let scenario = |(name, techniques)| {
        Scenario::default_session(format!("honest/technique/{name}"), MUSTS).with_world(|options| {
            options.host.techniques = techniques;
            options.profile.count = 300;
            options.host.queue_depth = 16;
            options.profile.depth = 32;
        })
    };
    choices.into_iter().map(scenario).collect()
}

/// Depths, queues, sizes, boundaries, kinds of requests.
fn workload_shapes() -> Vec<Scenario> {
    let shape = |name: &str, change: fn(&mut WorldOptions)| {
        Scenario::default_session(format!("honest/shape/{name}"), MUSTS).with_world(change)
    };
    vec![
        shape("depth-2", |options| options.host.queue_depth = 2),
        shape("deeper-than-the-queue", |options| {
            options.host.queue_depth = 4;
            options.profile.depth = 32;
        }),
        shape("four-queue-pairs", |options| {
            options.host.queue_pairs = 4;
            options.profile.depth = 32;
            options.profile.count = 200;
        }),
        shape("more-queue-pairs-than-there-are", |options| {
            options.host.queue_pairs = 4;
            options.function.io_queues_max = 2;
        }),
        shape("blocks-of-4096", |options| options.medium.block_size = 4096),
        shape("split-at-a-boundary", |options| {
            options.medium.optimal_boundary_blocks = 16;
            options.profile.blocks = (1, 64);
        }),
        shape("split-at-an-odd-boundary", |options| {
            options.medium.optimal_boundary_blocks = 24;
            options.profile.blocks = (1, 64);
        }),
        shape("split-above-mdts", |options| {
            options.function.transfer_bytes_max = 8192;
            options.profile.blocks = (1, 96);
        }),
        shape("stable-medium", |options| options.medium.durability = Durability::Persistent),
        shape("shallow-medium", |options| options.medium.depth = 3),
        shape("shadow-doorbells", |options| options.host.controller.shadow_doorbells = true),
        shape("interrupts", |options| options.host.interrupts = true),
        shape("interrupts-shadow-doorbells", |options| {
            options.host.interrupts = true;
            options.host.controller.shadow_doorbells = true;
            options.profile.count = 200;
        }),
        shape("interrupts-deferred-doorbell", |options| {
            options.host.interrupts = true;
            options.host.techniques.completion_doorbell = CompletionDoorbell::Deferred;
            options.profile.count = 200;
        }),
        shape("slow-bus", |options| {
            options.device.posting = (Span::from_us(50), Span::from_us(500));
            options.device.configuration_lag = Span::from_ms(50);
        }),
        shape("slow-to-get-ready", |options| {
            options.device.configuration_lag = Span::from_ms(400);
        }),
        shape("keep-alive", |options| {
            super::set_slow_medium(options);
            options.host.controller.keep_alive = Some(Span::from_ms(200));
        }),
        // The effect of copies and of write uncorrectable is not predictable, so reads may fail and
        // compares may differ.
        Scenario {
            musts: vec![
                ScenarioCheck::Attach,
                ScenarioCheck::NoEvent("ResetStarted"),
                ScenarioCheck::Survive,
            ],
            ..shape("everything", |options| {
                options.profile.mix = OperationMix::Everything;
                options.profile.count = 300;
            })
        },
    ]
}
