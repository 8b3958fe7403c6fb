//! Firmware Image Download and Firmware Commit as commands.

use tenmil_wire::admin::{
    CommitAction, FirmwareCommit, FirmwareImageDownload, GetLogPage, Identify,
};
use tenmil_wire::identify::{Cns, IdentifyController};
use tenmil_wire::log::LogPage;
use tenmil_wire::log::firmware::FirmwareSlots;
use tenmil_wire::{Layout, Status};

use super::fixture::ControllerFixture;
use crate::controller::{ControllerConfig, firmware_image};

fn run_firmware_download(
    bench: &mut ControllerFixture,
    offset_bytes: u32,
    piece: &[u8],
) -> Result<u32, Status> {
    let numd = u32::try_from(piece.len() / 4).unwrap() - 1;
    bench.run_with_data(FirmwareImageDownload { numd, ofst: offset_bytes / 4 }, piece)
}

fn firmware_commit_command(fs: u8, ca: CommitAction) -> FirmwareCommit {
    FirmwareCommit { fs, ca, bpid: false }
}

fn active_revision(bench: &mut ControllerFixture) -> String {
    let identify = Identify { cns: Cns::Controller.code(), ..Identify::default() };
    IdentifyController::parse(&bench.run_for_data(identify).unwrap()).unwrap().fr().to_string()
}

fn slot_revisions(bench: &mut ControllerFixture) -> FirmwareSlots {
    let page = bench.run_for_data(GetLogPage::new(LogPage::FirmwareSlot.code(), 512)).unwrap();
    FirmwareSlots::parse(&page).unwrap()
}

#[test]
fn firmware_image_is_activated_immediately_or_at_reset() {
    let mut bench = ControllerFixture::new();
    assert_eq!(active_revision(&mut bench), concat!("t", env!("CARGO_PKG_VERSION")));
    run_firmware_download(&mut bench, 0, &firmware_image("two")).unwrap();
    bench.run_without_data(firmware_commit_command(2, CommitAction::ReplaceAndActivate)).unwrap();
    assert_eq!(active_revision(&mut bench), concat!("t", env!("CARGO_PKG_VERSION")));
    let page = slot_revisions(&mut bench);
    assert_eq!((page.cafslt(), page.nrafslt()), (1, 2));
    assert_eq!(page.frs(1).unwrap().to_string(), "two");
    bench.controller.reset(bench.now);
    assert_eq!(active_revision(&mut bench), "two");

    run_firmware_download(&mut bench, 0, &firmware_image("three")).unwrap();
    bench.run_without_data(firmware_commit_command(3, CommitAction::ActivateNow)).unwrap();
    assert_eq!(active_revision(&mut bench), "three");
    let page = slot_revisions(&mut bench);
    assert_eq!((page.cafslt(), page.nrafslt()), (3, 0));
    bench.run_without_data(firmware_commit_command(1, CommitAction::Activate)).unwrap();
    bench.subsystem.emulate_power_cycle();
    assert_eq!(active_revision(&mut bench), concat!("t", env!("CARGO_PKG_VERSION")));
}

#[test]
fn invalid_firmware_commit_is_rejected() {
    let cases = [
        (firmware_commit_command(1, CommitAction::Replace), Status::INVALID_FIRMWARE_SLOT),
        (firmware_commit_command(4, CommitAction::Replace), Status::INVALID_FIRMWARE_SLOT),
        (firmware_commit_command(0, CommitAction::Activate), Status::INVALID_FIRMWARE_SLOT),
        (firmware_commit_command(2, CommitAction::Activate), Status::INVALID_FIRMWARE_IMAGE),
        (firmware_commit_command(2, CommitAction::Reserved(4)), Status::INVALID_FIELD),
        (firmware_commit_command(2, CommitAction::ReplaceBootPartition), Status::INVALID_FIELD),
        (
            FirmwareCommit { bpid: true, ..firmware_commit_command(2, CommitAction::Replace) },
            Status::INVALID_FIELD,
        ),
    ];
    for (commit, status) in cases {
        let mut bench = ControllerFixture::new();
        run_firmware_download(&mut bench, 0, &firmware_image("two")).unwrap();
        assert_eq!(bench.run_without_data(commit), Err(status), "{commit:?}");
        assert_eq!(active_revision(&mut bench), concat!("t", env!("CARGO_PKG_VERSION")));
    }
    let mut bench = ControllerFixture::new();
    let nothing = bench.run_without_data(firmware_commit_command(2, CommitAction::Replace));
    assert_eq!(nothing, Err(Status::INVALID_FIRMWARE_IMAGE), "nothing was downloaded");
}

#[test]
fn firmware_parts_are_checked_and_discarded_at_reset() {
    let config = ControllerConfig { firmware_bytes_max: 8192, ..ControllerConfig::default() };
    let mut bench = ControllerFixture::with_config(vec![], |_| {}, config);
    assert_eq!(run_firmware_download(&mut bench, 4, &[0; 4096]), Err(Status::INVALID_FIELD));
    assert_eq!(run_firmware_download(&mut bench, 0, &[0; 2048]), Err(Status::INVALID_FIELD));
    assert_eq!(run_firmware_download(&mut bench, 8192, &[0; 4096]), Err(Status::INVALID_FIELD));
    let huge = FirmwareImageDownload { numd: u32::MAX, ofst: u32::MAX };
    assert_eq!(
        bench.run_with_data(huge, &[]),
        Err(Status::INVALID_FIELD),
        "above the largest transfer"
    );
    run_firmware_download(&mut bench, 0, &firmware_image("two")).unwrap();
    let again = run_firmware_download(&mut bench, 0, &firmware_image("two"));
    assert_eq!(again, Err(Status::OVERLAPPING_RANGE));
    bench.controller.reset(bench.now);
    assert_eq!(run_firmware_download(&mut bench, 0, &firmware_image("two")), Ok(0));
}
