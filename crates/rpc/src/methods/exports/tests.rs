//! Methods of exports, without listeners: output and changes.

use std::sync::Arc;

use serde_json::{Value, json};
use tenmil_base::BlockDevice;
use tenmil_block::{Bdev, BdevOptions, QosLimiter, QosLimits};
use tenmil_dma::RegionTable;
use tenmil_drivers::{FileDevice, FileDeviceOptions, NullDevice};
use tenmil_linux::Clock;
use tenmil_linux::engine::EngineChoice;
use tenmil_serve::nbd::{DisconnectReason, ExportConfig, ExportedDevice, NbdEvent, NbdStats};

use super::Exports;
use crate::error::{Code, RpcError};
use crate::event::announcements;
use crate::methods::TABLE;
use crate::{Arguments, CallContext, DeferredReply, ServerState};

fn served(name: &str) -> Arc<ExportedDevice> {
    serve(name, Arc::new(NullDevice::new(512, 2048).unwrap()), true)
}

fn serve(name: &str, medium: Arc<dyn BlockDevice>, is_read_only: bool) -> Arc<ExportedDevice> {
    let clock = Clock::start();
    let limiter = Some(QosLimiter::new(QosLimits::default()));
    let options = BdevOptions { limiter: limiter.clone(), ..BdevOptions::new(clock, 1) };
    let device = Bdev::new("null0", medium, options).unwrap();
    let served = ExportedDevice::new(ExportConfig {
        name: name.into(),
        description: String::new(),
        uri: "null:?size=1m".into(),
        device: &device,
        limiter,
        is_read_only,
        allows_resize: false,
        regions: &RegionTable::new(4),
    });
    Arc::new(served.unwrap())
}

fn state(names: &[&str]) -> ServerState {
    let all = names.iter().map(|name| served(name)).collect();
    ServerState::new().with(Exports::new(all, Clock::start()))
}

/// Calls a method and checks its result against the schema of its table row.
fn ask(state: &ServerState, method: &str, parameters: &Value) -> Result<Value, RpcError> {
    let method = TABLE.find(method).unwrap();
    let arguments = Arguments::check(method, parameters.as_object().unwrap())?;
    let answer = (method.run)(&CallContext {
        table: &TABLE,
        state,
        arguments: &arguments,
        later: &DeferredReply::default(),
        passed: &crate::PassedFd::default(),
    })?;
    assert_eq!(method.answer.check(&answer), Ok(()));
    Ok(answer)
}

#[test]
fn an_export_tells_what_it_is_and_who_is_there() {
    let state = state(&["disk"]);
    let rows = ask(&state, "exports", &json!({})).unwrap();
    assert_eq!((&rows[0]["name"], &rows[0]["uri"]), (&json!("disk"), &json!("null:?size=1m")));
    assert_eq!((&rows[0]["size_bytes"], &rows[0]["read_only"]), (&json!(1 << 20), &json!(true)));
    assert_eq!((&rows[0]["reads"], &rows[0]["read_p99_ns"]), (&json!(0), &Value::Null));
    assert_eq!(ask(&state, "connections", &json!({ "export": "disk" })).unwrap(), json!([]));
}

#[test]
fn limits_change_one_by_one_and_zero_takes_one_away() {
    let state = state(&["disk"]);
    let set = |change: Value| ask(&state, "set_export", &change).unwrap();
    set(json!({ "limit_iops": 1000, "write_limit_bytes": 5 }));
    let row = set(json!({ "read_limit_iops": 7, "limit_iops": 0 }));
    for (name, expected) in [
        ("limit_iops", Value::Null),
        ("limit_bytes", Value::Null),
        ("read_limit_iops", json!(7)),
        ("read_limit_bytes", Value::Null),
        ("write_limit_iops", Value::Null),
        ("write_limit_bytes", json!(5)),
    ] {
        assert_eq!(row[name], expected, "{name}");
    }
    assert_eq!(ask(&state, "exports", &json!({})).unwrap()[0], row);
}

#[test]
fn what_is_not_there_is_refused_with_what_is() {
    let refused = |names: &[&str], method, parameters| {
        let refusal = ask(&state(names), method, &parameters).unwrap_err();
        assert_eq!(refusal.code, Code::NotFound);
        refusal.message
    };
    let message = refused(&["a", "b"], "set_export", json!({}));
    assert_eq!(message, "set export: no name, expected a or b");
    let message = refused(&["a"], "set_export", json!({ "name": "c" }));
    assert_eq!(message, "set export: no `c`, expected a");
    let message = refused(&["a"], "set_connection", json!({ "id": 3, "disconnect": true }));
    assert!(message.contains("none has the number 3"), "{message}");
    let refusal = ask(&ServerState::new(), "exports", &json!({})).unwrap_err();
    assert_eq!(refusal.message, "this process has no exports, expected one that has");
}

#[test]
fn an_export_becomes_as_long_as_was_asked_or_says_why_not() {
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
    let exports = Exports::new(vec![serve("disk", medium, false)], Clock::start());
    let state = ServerState::new().with(exports);
    let resize = |size_bytes: u64| ask(&state, "set_export", &json!({ "size_bytes": size_bytes }));
    assert_eq!(resize(4096).unwrap()["size_bytes"], json!(4096));
    assert_eq!(std::fs::metadata(&options.path).unwrap().len(), 4096);
    assert_eq!(resize(8192).unwrap()["size_bytes"], json!(8192));
    let refusal = resize(1000).unwrap_err();
    assert_eq!(refusal.code, Code::Failed);
    assert!(refusal.message.contains("1000 bytes: expected a multiple of 512"), "{refusal:?}");
    let read_only = self::state(&["disk"]);
    let refusal = ask(&read_only, "set_export", &json!({ "size_bytes": 512 })).unwrap_err();
    assert!(refusal.message.contains("expected a claim to write it"), "{refusal:?}");
}

#[test]
fn a_removed_device_is_gone_for_good() {
    let state = state(&["disk"]);
    ask(&state, "set_export", &json!({ "remove": false })).unwrap();
    let medium = Arc::clone(state.part::<Exports>("exports").unwrap().served[0].medium());
    assert!(medium.channel().is_ok());
    ask(&state, "set_export", &json!({ "remove": true })).unwrap();
    assert!(medium.channel().is_err());
}

#[test]
fn what_happens_at_the_doors_is_announced_with_its_reason() {
    let (announcer, announced) = announcements().unwrap();
    let done = NbdStats { reads: 3, ..NbdStats::default() };
    let (connection, peer) = (7, "process 4711".to_owned());
    let new_events =
        NbdEvent::Disconnected { connection, peer, reason: DisconnectReason::TooSlow, done };
    announcer.announce_export("disk", &new_events);
    let event = announced.next().unwrap();
    assert_eq!(event.kind, super::DISCONNECTED);
    let text =
        "disk: connection 7: process 4711 disconnected: a request or reply exceeded its time limit";
    assert_eq!(event.text, text);
    assert_eq!((&event.about["reason"], &event.about["reads"]), (&json!("timeout"), &json!(3)));
    announcer.announce_export("disk", &NbdEvent::Removed);
    assert_eq!(announced.next().unwrap().kind, super::REMOVED);
}
