//! A runtime that is dropped: with devices open, with requests in flight, on its own threads.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::task::{Context, Wake, Waker};
use std::time::Duration;

use smol::future::{block_on, poll_once};
use tenmil_base::{
    BlockDevice, ChannelWakeup, CompletionBatch, Instant, IoChannel, Limits, Request, Segment,
    WakeSource,
};

use super::{TIME_LIMIT, TestRuntime, filled_buffer};
use crate::access::Access;
use crate::device::IoErrorKind;
use crate::runtime::Runtime;

#[test]
fn request_in_flight_completes_before_the_runtime_is_dropped() {
    let stage = TestRuntime::new();
    let device = stage.open("delay:[ram:1m]?write=50ms", Access::ReadWrite).unwrap();
    let mut write = Box::pin(device.write(0, filled_buffer(&device, 1, 1)));
    assert!(block_on(poll_once(&mut write)).is_none());
    let found = stage.busy_poll_count();
    while stage.busy_poll_count() == found {
        stage.wait_for_reactor_message();
    }
    drop(stage);
    let ended = block_on(poll_once(&mut write)).expect("the reactor has stopped");
    drop(write);
    assert_eq!(ended.unwrap().to_vec(), vec![1; 512]);
    assert!(device.is_removed());
    let gone = block_on(device.read(0, filled_buffer(&device, 1, 0))).unwrap_err();
    assert_eq!(gone.why, IoErrorKind::DeviceRemoved);
    assert!(gone.buffer.is_some(), "the device never had it");
    assert!(device.spawn(async {}).is_err());
    block_on(device.close());
}

/// A device that accepts requests and never completes one.
struct NeverCompletingDevice(Limits);

impl BlockDevice for NeverCompletingDevice {
    fn limits(&self) -> Limits {
        self.0.clone()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, tenmil_base::Error> {
        Ok(Box::new(Self(self.0.clone())))
    }
}

impl IoChannel for NeverCompletingDevice {
    fn limits(&self) -> &Limits {
        &self.0
    }

    fn submit(&mut self, _: Instant, requests: &[Request], _: &[Segment]) -> usize {
        requests.len()
    }

    fn poll(&mut self, _: Instant, _: &mut CompletionBatch) -> usize {
        0
    }
}

impl ChannelWakeup for NeverCompletingDevice {
    fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::Deadline
    }

    fn arm(&mut self) -> bool {
        false
    }
}

#[test]
fn device_that_never_completes_does_not_block_the_drop() {
    let builder = Runtime::builder().pin(false).stop_timeout(Duration::from_millis(50));
    let rt = builder.start().unwrap();
    let limits = block_on(rt.open("ram:1m", Access::ReadOnly)).unwrap().limits().clone();
    let silent = Arc::new(NeverCompletingDevice(limits));
    let device = block_on(rt.attach("silent", silent, Access::ReadWrite)).unwrap();
    let mut read = Box::pin(device.read(0, device.buffer(512).unwrap()));
    assert!(block_on(poll_once(&mut read)).is_none());
    drop(rt);
    let error = block_on(read).unwrap_err();
    assert_eq!(error.why, IoErrorKind::DeviceRemoved);
    assert_eq!(
        error.to_string(),
        "silent: read of block 0: the device was removed, or its runtime was dropped"
    );
}

#[test]
fn devices_are_closed_when_the_runtime_drop_returns() {
    let directory = tempfile::tempdir().unwrap();
    let uri = format!("file:{}?size=1m&engine=threads", directory.path().join("disk").display());
    for round in 0..3_u8 {
        // The kernel's lock of the file would refuse a second opening.
        let stage = TestRuntime::new();
        let device = stage.open(&uri, Access::Exclusive).unwrap();
        let buffer = block_on(device.read(0, filled_buffer(&device, 1, 9))).unwrap();
        assert_eq!(buffer.to_vec()[0], round);
        block_on(device.write(0, filled_buffer(&device, 1, round + 1))).unwrap();
        drop(stage);
        drop(device);
    }
}

#[test]
fn runtime_may_be_dropped_by_a_task_on_its_own_reactor() {
    let stage = TestRuntime::new();
    let device = stage.open("ram:1m", Access::ReadWrite).unwrap();
    let (send, ended) = channel();
    let (rt, mine) = (stage.0.clone(), device.clone());
    let task = device.spawn(async move {
        let buffer = mine.read(0, mine.buffer(512).unwrap()).await.unwrap();
        drop((rt, buffer));
        send.send(()).unwrap();
    });
    task.unwrap().detach();
    let TestRuntime(rt) = stage;
    drop(rt);
    ended.recv_timeout(TIME_LIMIT).unwrap();
    while !device.is_removed() {
        tenmil_linux::named_thread::yield_cpu();
    }
}

/// A waker that drops a runtime when it is woken.
struct RuntimeDroppingWaker(std::sync::Mutex<Option<Runtime>>, std::sync::mpsc::Sender<()>);

impl Wake for RuntimeDroppingWaker {
    fn wake(self: Arc<Self>) {
        drop(self.0.lock().unwrap().take());
        let _ = self.1.send(());
    }
}

#[test]
fn runtime_may_be_dropped_by_the_thread_that_opened_a_device() {
    let TestRuntime(rt) = TestRuntime::new();
    let entry = rt.0.services.devices.registry_entry("ram:1m");
    let held = entry.lock().unwrap();
    let mut opening = Box::pin(rt.open("ram:1m", Access::ReadWrite));
    let (send, woken) = channel();
    let waker = Waker::from(Arc::new(RuntimeDroppingWaker(std::sync::Mutex::new(Some(rt)), send)));
    assert!(opening.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    drop(held);
    woken.recv_timeout(TIME_LIMIT).unwrap();
}

#[test]
fn block_on_is_rejected_on_a_reactor() {
    let stage = TestRuntime::new();
    let device = stage.open("ram:1m", Access::ReadOnly).unwrap();
    let rt = stage.0.clone();
    let task = device.spawn(async move { rt.block_on(async {}) }).unwrap();
    let error = block_on(task).unwrap_err();
    assert!(error.to_string().contains("block_on is called on a reactor"), "{error}");
}
