//! Methods of exports, without listeners: output and changes.

use std::num::NonZeroU64;
use std::sync::Arc;

use serde_json::{Value, json};
use tenmil_base::BlockDevice;
use tenmil_block::{Bdev, BdevOptions, QosLimits, RateLimit};
use tenmil_dma::RegionTable;
use tenmil_drivers::{FileDevice, FileDeviceOptions, NullDevice};
use tenmil_linux::Clock;
use tenmil_linux::file_engine::EngineChoice;
use tenmil_serve::nbd::{DisconnectReason, ExportConfig, ExportedDevice, NbdEvent, NbdStats};

use super::NbdExports;
use crate::ProcessParts;
use crate::error::ErrorCode;
use crate::event::event_channel;
use crate::methods::test_calls::call_method;

fn exported_device(name: &str) -> Arc<ExportedDevice> {
    start_export(name, Arc::new(NullDevice::new(512, 2048).unwrap()), true)
}

fn start_export(
    name: &str,
    medium: Arc<dyn BlockDevice>,
    is_read_only: bool,
) -> Arc<ExportedDevice> {
    let clock = Clock::start();
    let device = Bdev::new("null0", medium, BdevOptions::new(clock, 1)).unwrap();
    let served = ExportedDevice::new(ExportConfig {
        name: name.into(),
        description: String::new(),
        uri: "null:?size=1m".into(),
        device: &device,
        limits: QosLimits {
            writes: RateLimit { bytes: NonZeroU64::new(5), iops: None },
            ..QosLimits::default()
        },
        is_read_only,
        allows_resize: false,
        regions: &RegionTable::new(4),
    });
    Arc::new(served.unwrap())
}

fn method_state(names: &[&str]) -> ProcessParts {
    let all = names.iter().map(|name| exported_device(name)).collect();
    ProcessParts::new().with_part(NbdExports::new(all))
}

#[test]
fn export_row_describes_the_export_and_its_connections() {
    let state = method_state(&["disk"]);
    let rows = call_method(&state, "exports", &json!({})).unwrap();
    assert_eq!((&rows[0]["name"], &rows[0]["uri"]), (&json!("disk"), &json!("null:?size=1m")));
    assert_eq!((&rows[0]["size_bytes"], &rows[0]["read_only"]), (&json!(1 << 20), &json!(true)));
    assert_eq!((&rows[0]["reads"], &rows[0]["read_p99_ns"]), (&json!(0), &Value::Null));
    assert_eq!(
        call_method(&state, "connections", &json!({ "export": "disk" })).unwrap(),
        json!([])
    );
}

#[test]
fn rate_limits_are_in_the_row_and_in_the_list_of_limits() {
    let state = method_state(&["disk"]);
    let row = &call_method(&state, "exports", &json!({})).unwrap()[0];
    assert_eq!((&row["write_limit_bytes"], &row["limit_iops"]), (&json!(5), &Value::Null));
    let row = &call_method(&state, "limits", &json!({})).unwrap()[0];
    assert_eq!((&row["of"], &row["export"]), (&json!("export"), &json!("disk")));
    assert_eq!((&row["write_bytes"], &row["iops"]), (&json!(5), &Value::Null));
}

#[test]
fn unknown_export_or_connection_is_rejected_with_known_ones() {
    let refused = |names: &[&str], method, parameters| {
        let refusal = call_method(&method_state(names), method, &parameters).unwrap_err();
        assert_eq!(refusal.code, ErrorCode::NotFound);
        refusal.message
    };
    let message = refused(&["a", "b"], "set_export", json!({}));
    assert_eq!(message, "set export: no name, expected a or b");
    let message = refused(&["a"], "set_export", json!({ "name": "c" }));
    assert_eq!(message, "set export: no `c`, expected a");
    let message = refused(&["a"], "set_connection", json!({ "id": 3, "disconnect": true }));
    assert!(message.contains("none has the number 3"), "{message}");
    let refusal = call_method(&ProcessParts::new(), "exports", &json!({})).unwrap_err();
    assert_eq!(refusal.message, "this process has no exports, expected one that has");
}

#[test]
fn export_is_resized_or_the_error_says_why_not() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    let regions = RegionTable::new(8);
    let options = FileDeviceOptions {
        path,
        size_bytes: Some(1 << 20),
        block_size: 512,
        direct: false,
        read_only: false,
        engine: EngineChoice::Threads,
    };
    let medium = Arc::new(FileDevice::open(&regions, &options).unwrap());
    let exports = NbdExports::new(vec![start_export("disk", medium, false)]);
    let state = ProcessParts::new().with_part(exports);
    let resize =
        |size_bytes: u64| call_method(&state, "set_export", &json!({ "size_bytes": size_bytes }));
    assert_eq!(resize(4096).unwrap()["size_bytes"], json!(4096));
    assert_eq!(std::fs::metadata(&options.path).unwrap().len(), 4096);
    assert_eq!(resize(8192).unwrap()["size_bytes"], json!(8192));
    let refusal = resize(1000).unwrap_err();
    assert_eq!(refusal.code, ErrorCode::Failed);
    assert!(refusal.message.contains("1000 bytes: expected a multiple of 512"), "{refusal:?}");
    let read_only = method_state(&["disk"]);
    let refusal = call_method(&read_only, "set_export", &json!({ "size_bytes": 512 })).unwrap_err();
    assert!(refusal.message.contains("expected a claim to write it"), "{refusal:?}");
}

#[test]
fn removed_device_stays_removed() {
    let state = method_state(&["disk"]);
    call_method(&state, "set_export", &json!({ "remove": false })).unwrap();
    let medium =
        Arc::clone(state.find_part::<NbdExports>("exports").unwrap().served()[0].block_device());
    assert!(medium.channel().is_ok());
    call_method(&state, "set_export", &json!({ "remove": true })).unwrap();
    assert!(medium.channel().is_err());
}

#[test]
fn connection_events_carry_their_reason() {
    let (announcer, announced) = event_channel().unwrap();
    let done = NbdStats { reads: 3, ..NbdStats::default() };
    let (connection, peer) = (7, "process 4711".to_owned());
    let new_events =
        NbdEvent::Disconnected { connection, peer, reason: DisconnectReason::TooSlow, done };
    announcer.emit_export_event("disk", &new_events);
    let event = announced.next().unwrap();
    assert_eq!(event.kind, super::DISCONNECTED);
    let text =
        "disk: connection 7: process 4711 disconnected: a request or reply exceeded its time limit";
    assert_eq!(event.text, text);
    assert_eq!((&event.about["reason"], &event.about["reads"]), (&json!("timeout"), &json!(3)));
    announcer.emit_export_event("disk", &NbdEvent::Removed);
    assert_eq!(announced.next().unwrap().kind, super::REMOVED);
}
