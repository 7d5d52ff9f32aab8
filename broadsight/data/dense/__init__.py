"""Data for detection, segmentation and keypoints: images with boxes, masks, keypoints or classes of pixels."""
