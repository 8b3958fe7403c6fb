//! The process ends at any step of binding and unbinding.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::kernel::{FakeKernel, Gone};
use super::tree::{FUNCTION, SECOND, Tree, address, marks};
use crate::pci::{BindRequest, UnbindSelection, bind, recorded, unbind};

/// Machines on which binding takes every kind of step.
const TREES: [(&str, bool); 5] = [
    ("second-function 13", false),
    ("second-function 12; override nvme", false),
    ("second-function 13; driver none", false),
    ("second-function 13; driver uio_pci_generic; override uio_pci_generic", false),
    ("second-function 13; no-iommu; no-iommu-second", true),
];

/// Runs `act` until the process is gone; returns whether it completed.
fn until_gone(kernel: &FakeKernel<'_>, calls: u32, act: impl FnOnce(&FakeKernel<'_>)) -> bool {
    kernel.calls_left.set(calls);
    let ended = catch_unwind(AssertUnwindSafe(|| act(kernel)));
    kernel.calls_left.set(u32::MAX);
    match ended {
        Ok(()) => true,
        Err(why) => {
            assert!(why.is::<Gone>(), "another panic than the one that was asked for");
            false
        }
    }
}

fn take(kernel: &FakeKernel<'_>, no_iommu: bool) {
    let terms =
        BindRequest { owner: Some(1000), no_iommu, even_if_in_use: &[], signatures: &marks };
    bind(kernel, &[address(FUNCTION), address(SECOND)], &terms).unwrap();
}

fn give_back(kernel: &FakeKernel<'_>) {
    unbind(kernel, &UnbindSelection::All).1.unwrap();
}

#[test]
fn whatever_was_taken_is_given_back_after_a_crash_at_any_step() {
    for (words, no_iommu) in TREES {
        for calls in 0.. {
            let tree = Tree::of(words);
            let (kernel, before) = (FakeKernel::new(&tree), tree.state());
            let ended = until_gone(&kernel, calls, |kernel| take(kernel, no_iommu));
            give_back(&kernel);
            assert_eq!(tree.state(), before, "`{words}`, cut after {calls} calls");
            if ended {
                assert!(calls >= 6, "`{words}` takes {calls} calls only");
                break;
            }
        }
    }
}

#[test]
fn giving_back_goes_on_after_a_crash_at_any_step() {
    for (words, no_iommu) in TREES {
        for calls in 0.. {
            let tree = Tree::of(words);
            let (kernel, before) = (FakeKernel::new(&tree), tree.state());
            take(&kernel, no_iommu);
            let ended = until_gone(&kernel, calls, give_back);
            give_back(&kernel);
            assert_eq!(tree.state(), before, "`{words}`, cut after {calls} calls");
            if ended {
                break;
            }
        }
    }
}

#[test]
fn taking_goes_on_after_a_crash_and_the_former_driver_is_not_forgotten() {
    for (words, no_iommu) in TREES {
        for calls in 0..12 {
            let tree = Tree::of(words);
            let (kernel, before) = (FakeKernel::new(&tree), tree.state());
            until_gone(&kernel, calls, |kernel| take(kernel, no_iommu));
            take(&kernel, no_iommu);
            assert_eq!(recorded(&tree.machine), [address(FUNCTION), address(SECOND)]);
            give_back(&kernel);
            assert_eq!(tree.state(), before, "`{words}`, cut after {calls} calls");
        }
    }
}
